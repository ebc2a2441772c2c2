"""Eight families of synthetic questions with worked answers that can be checked by program.

In a worked answer most characters are easy (copies, punctuation, bookkeeping) and a few are hard (a product,
a carry, a remainder).  A small model gets the easy ones right, which makes routing token by token pay.

    python -m recipes.demo.tasks                            one sample of each family, with lengths
    python -m recipes.demo.tasks --write FILE --count 1000  held-out prompts, as recipes/demo/eval.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = """
milk eggs bread rice salt tea soup corn beans apple grape lemon mango peach plum olive onion garlic butter
cheese honey sugar flour pasta bacon steak salad cream mint basil thyme cumin water juice coffee banana
table chair lamp clock radio phone paper pencil ruler stapler folder binder marker brush paint canvas hammer
nail screw drill rope tape glue wire cable plug fuse valve hose pipe pump tank wheel chain river stone cloud
storm ocean beach field forest meadow valley hill cliff cave desert island lake strawberry letter committee
balloon pepper kitten rabbit zebra tiger mississippi tomorrow
""".split()
ITEMS = """
pens cups caps bags mugs hats keys pins toys maps jars fans nuts pies eggs bats kits rugs pots tubs
""".split()
NAMES = "Tom Ann Ben Mia Sam Eva Leo Zoe Max Amy".split()
EVAL_SEED = 20261129


@dataclass(frozen=True, slots=True)
class Problem:
    """A question of one family with its worked answer."""

    task: str
    question: str
    answer: str


Drafted = tuple[str, str, str]
"""Key, question and answer, as a family drafts them; two wordings of one problem share the key."""


def _times(rng: Random, a: int, b: int) -> str:
    wording = rng.choice(("{}*{}=?", "What is {} times {}?", "Compute {} x {}.", "{} x {} = ?"))
    return wording.format(a, b)


def _add_columns(a: int, b: int) -> str:
    """Column addition, ones first: 487 + 356 is written ``7+6=13, 8+5+1=14, 4+3+1=8``."""
    steps = []
    carry = 0
    while a or b:
        a, x = divmod(a, 10)
        b, y = divmod(b, 10)
        total = x + y + carry
        steps.append(f"{x}+{y}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
    return ", ".join(steps)


def multiply(rng: Random) -> Drafted:
    """Two digits times one."""
    a = 10 * rng.randint(1, 9) + rng.randint(1, 9)
    b = rng.randint(2, 9)
    question = _times(rng, a, b)
    ones = a % 10
    tens = a - ones
    work = f"{tens}*{b}={tens * b}, {ones}*{b}={ones * b}, {tens * b}+{ones * b}={a * b}"
    return f"{a}*{b}", question, f"{work}. Answer: {a * b}"


def multiply_long(rng: Random) -> Drafted:
    """Two digits times two, by partial products and a column sum."""
    a = 10 * rng.randint(1, 9) + rng.randint(1, 9)
    b = 10 * rng.randint(2, 9) + rng.randint(2, 9)
    question = _times(rng, a, b)
    ones = a % 10
    partials = [(part, a * part) for part in (b % 10, b - b % 10)]
    lines = [f"{a}*{part}={(a - ones) * part}+{ones * part}={product}. " for part, product in partials]
    (_, low), (_, high) = partials
    return f"{a}*{b}", question, f"{''.join(lines)}{_add_columns(high, low)}. Answer: {a * b}"


def add(rng: Random) -> Drafted:
    """Two numbers of three digits, or of four."""
    low, high = rng.choice(((100, 999), (1000, 9999)))
    a, b = rng.randint(low, high), rng.randint(low, high)
    question = rng.choice(("{}+{}=?", "What is {} plus {}?", "Add {} and {}.")).format(a, b)
    return f"{a}+{b}", question, f"{_add_columns(a, b)}. Answer: {a + b}"


def divide(rng: Random) -> Drafted:
    """Long division by one digit, with remainder."""
    divisor = rng.randint(3, 9)
    digits = [rng.randint(divisor, 9), *(rng.randint(0, 9) for _ in range(rng.randint(2, 3)))]
    number = int("".join(map(str, digits)))
    steps = []
    rest = 0
    for digit in digits:
        brought_down = 10 * rest + digit
        quotient, rest = divmod(brought_down, divisor)
        steps.append(f"{brought_down}/{divisor}={quotient} r {rest}")
    question = rng.choice(("{}/{}=?", "Divide {} by {}.", "What is {} divided by {}?")).format(
        number, divisor
    )
    return f"{number}/{divisor}", question, f"{', '.join(steps)}. Answer: {number // divisor} r {rest}"


def shop(rng: Random) -> Drafted:
    """A word problem: two purchases and their total."""
    costs = [100]
    while max(costs) >= 100:
        deal = [(rng.randint(2, 9), rng.randint(2, 12)) for _ in range(2)]
        costs = [count * price for count, price in deal]
    (n1, p1), (n2, p2) = deal
    first, second = rng.sample(ITEMS, 2)
    wording = rng.choice(
        (
            "{} buys {} {} at ${} and {} {} at ${}. Total?",
            "{} sold {} {} for ${} each and {} {} for ${} each. Total?",
        )
    )
    question = wording.format(rng.choice(NAMES), n1, first, p1, n2, second, p2)
    a, b = costs
    tens, ones = b - b % 10, b % 10
    total = f"{a}+{tens}={a + tens}, {a + tens}+{ones}={a + b}" if tens and ones else f"{a}+{b}={a + b}"
    work = f"{first}: {n1}*{p1}={a}. {second}: {n2}*{p2}={b}. {total}"
    return question, question, f"{work}. Answer: ${a + b}"


def count(rng: Random) -> Drafted:
    """How often a letter is in a word, or in a random string."""
    if rng.random() < 0.5:
        word = rng.choice(WORDS)
    else:
        word = "".join(rng.choice(LETTERS[: rng.choice((6, 12, 26))]) for _ in range(rng.randint(5, 10)))
    letter = rng.choice(word)
    tally = [f"{char}{word[: place + 1].count(letter)}" for place, char in enumerate(word)]
    question = rng.choice(("How many {} in {}?", "Count the letter {} in {}.")).format(letter, word)
    return f"{letter} in {word}", question, f"{' '.join(tally)}. Answer: {word.count(letter)}"


def json_list(rng: Random) -> Drafted:
    """Words as a JSON list; the whole text is the answer."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    question = rng.choice(("Make a JSON list: {}.", "Write as JSON: {}.")).format(", ".join(words))
    return ",".join(words), question, json.dumps(words)


def ledger(rng: Random, lines: tuple[int, int] = (15, 20)) -> Drafted:
    """A running balance, one small step per line; ``lines`` is the range of their number."""
    start = balance = rng.randint(5, 95)
    entries = []
    work = []
    for name in LETTERS[: rng.randint(*lines)]:
        change = rng.choice([d for d in range(-9, 10) if d and 0 <= balance + d <= 99])
        entries.append(f"{name}{change:+d}")
        work.append(f"{entries[-1]}: {balance}{change:+d}={balance + change}")
        balance += change
    key = f"{start} {entries}"
    return key, f"Ledger from {start}: {' '.join(entries)}", f"{'; '.join(work)}. Answer: {balance}"


FAMILIES: dict[str, Callable[[Random], Drafted]] = {
    "mul": multiply,
    "mul2": multiply_long,
    "add": add,
    "div": divide,
    "shop": shop,
    "count": count,
    "json": json_list,
    "ledger": ledger,
}
TASKS = tuple(FAMILIES)
TRAINING_MIX = {"mul": 2, "mul2": 3, "add": 2, "div": 3, "shop": 2, "count": 2, "json": 3, "ledger": 2.5}


def is_held_out(task: str, key: str) -> bool:
    """One problem in sixteen is never trained on; evaluation uses only those."""
    return zlib.crc32(f"{task}{key}".encode()) % 16 == 0


def draw(rng: Random, task: str, *, held_out: bool = False, short_ledger: bool = False) -> Problem:
    """A problem of the held-out part or of the training part; ``short_ledger`` gives 3 to 10 lines."""
    while True:
        short = task == "ledger" and short_ledger
        key, question, answer = ledger(rng, (3, 10)) if short else FAMILIES[task](rng)
        if is_held_out(task, key) == held_out:
            return Problem(task, question, answer)


def draw_task(rng: Random) -> str:
    """A family, with the frequencies of the training mix."""
    return rng.choices(list(TRAINING_MIX), list(TRAINING_MIX.values()))[0]


def problems(
    per_task: int, seed: int, *, tasks: Sequence[str] = TASKS, held_out: bool = True
) -> list[Problem]:
    """``per_task`` problems of every family, no question twice."""
    rng = Random(seed)
    found: list[Problem] = []
    for task in tasks:
        questions: set[str] = set()
        while len(questions) < per_task:
            problem = draw(rng, task, held_out=held_out)
            if problem.question not in questions:
                questions.add(problem.question)
                found.append(problem)
    return found


def checked_part(text: str) -> str:
    """What of an answer counts: the value after ``Answer: ``, or all of it for a JSON list."""
    text = text.strip()
    match = re.search(r"Answer: (\$?[0-9]+(?: r [0-9]+)?)$", text)
    return match[1] if match else text


def is_correct(text: str, reference: str) -> bool:
    """Whether two answers agree in the part that counts."""
    return checked_part(text) == checked_part(reference)


def prompt_text(question: str) -> str:
    """The prompt as the models were trained on it, without the beginning-of-sequence token."""
    return f"Q: {question}\nA: "


def eval_rows(count: int, seed: int = EVAL_SEED) -> Iterable[dict[str, object]]:
    """Rows of an evaluation file: held-out problems of all families in random order."""
    chosen = problems(count // len(TASKS), seed)
    Random(seed).shuffle(chosen)
    for index, problem in enumerate(chosen):
        yield {
            "id": index,
            "task": problem.task,
            "messages": [{"role": "user", "content": problem.question}],
            "prompt": prompt_text(problem.question),
            "answer": checked_part(problem.answer),
            "reference": problem.answer,
        }


def load_eval(path: Path, limit: int | None = None) -> list[Problem]:
    """The problems of an evaluation file, at most ``limit`` of them."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:limit]]
    return [Problem(row["task"], row["messages"][0]["content"], row["reference"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.demo.tasks", description="Synthetic questions.")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write held-out prompts here, as JSON lines"
    )
    parser.add_argument("--count", type=int, default=1000, help="number of prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=EVAL_SEED, help="(default: %(default)s)")
    args = parser.parse_args()
    if args.write:
        args.write.write_text("".join(f"{json.dumps(row)}\n" for row in eval_rows(args.count, args.seed)))
        return
    rng = Random(0)
    for task in TASKS:
        samples = [draw(rng, task) for _ in range(300)]
        answers = [len(sample.answer) for sample in samples]
        prompts = [len(prompt_text(sample.question)) for sample in samples]
        print(
            f"[{task}] prompt {statistics.mean(prompts):.0f} characters, "
            f"answer {statistics.mean(answers):.0f} ({min(answers)} to {max(answers)})"
        )
        print(f"{prompt_text(samples[-1].question)}{samples[-1].answer}\n")


if __name__ == "__main__":
    main()
