from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.demo import tasks
from recipes.demo.tasks import TASKS

EVAL = Path(tasks.__file__).parent / "eval.jsonl"


def test_the_evaluation_prompts_are_reproduced_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["tasks", "--write", str(tmp_path / "eval.jsonl")])
    tasks.main()
    assert (tmp_path / "eval.jsonl").read_bytes() == EVAL.read_bytes()


def test_without_a_file_a_sample_of_every_family_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["tasks"])
    tasks.main()
    assert re.findall(r"^\[(\w+)\]", capsys.readouterr().out, re.MULTILINE) == list(TASKS)


@given(st.sampled_from(TASKS), st.integers(0, 2**32))
def test_every_step_of_a_worked_answer_is_true(task: str, seed: int) -> None:
    answer = tasks.draw(Random(seed), task).answer
    chains = [clause.split("=") for clause in re.split(r"[.,;:] ", answer) if "=" in clause]
    assert chains or task in {"count", "json"}
    for sides in chains:
        assert len({value_of(side) for side in sides}) == 1, f"{sides} in {answer}"


def value_of(expression: str) -> tuple[int, int]:
    """A quotient and a remainder: of a division, of a result like ``5 r 2``, or of plain arithmetic."""
    if "/" in expression:
        return divmod(*map(int, expression.split("/")))
    if " r " in expression:
        quotient, remainder = map(int, expression.split(" r "))
        return quotient, remainder
    assert re.fullmatch(r"\d+([*+-]\d+)*", expression), expression
    return eval(expression), 0


@given(st.integers(0, 2**32))
def test_final_values_are_right(seed: int) -> None:
    rng = Random(seed)
    a, b = map(int, re.findall(r"\d+", (mul := tasks.draw(rng, "mul2")).question))
    assert tasks.checked_part(mul.answer) == str(a * b)
    a, b = map(int, re.findall(r"\d+", (div := tasks.draw(rng, "div")).question))
    assert tasks.checked_part(div.answer) == f"{a // b} r {a % b}"
    counts = list(map(int, re.findall(r"\d+", (shop := tasks.draw(rng, "shop")).question)))
    assert tasks.checked_part(shop.answer) == f"${counts[0] * counts[1] + counts[2] * counts[3]}"
    start, *changes = map(int, re.findall(r"[+-]?\d+", (ledger := tasks.draw(rng, "ledger")).question))
    assert tasks.checked_part(ledger.answer) == str(start + sum(changes))
    assert isinstance(json.loads(tasks.draw(rng, "json").answer), list)


@given(st.sampled_from(TASKS), st.integers(0, 2**32))
def test_training_and_evaluation_never_share_a_problem(task: str, seed: int) -> None:
    train, held = (tasks.draw(Random(seed), task, held_out=flag) for flag in (False, True))
    assert train.question != held.question


def test_no_question_comes_twice() -> None:
    questions = [problem.question for problem in tasks.problems(40, 3)]
    assert len(questions) == len(set(questions)) == 40 * len(TASKS)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("3*4=12. Answer: 12", "2*6=12. Answer: 12", True),
        ("Answer: 12\n", "Answer: 12", True),
        ("Answer: 12", "Answer: $12", False),
        ("Answer: 8 r 1", "Answer: 8", False),
        ("Answer: 12 or so", "Answer: 12", False),
        ("12", "Answer: 12", True),
        ('["milk"]', '["milk"]', True),
        ('["milk"', '["milk"]', False),
        ("", "Answer: 12", False),
    ],
)
def test_only_the_final_value_is_checked(text: str, reference: str, expected: bool) -> None:
    assert tasks.is_correct(text, reference) is expected
