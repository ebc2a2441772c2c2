"""What the demo pair answers while things go wrong: every scenario prints a row, and fails if it is not as promised.

::

    python -m bench.chaos                          every scenario but the soak
    python -m bench.chaos kills --kills 300        some of them
    python -m bench.chaos soak --duration 900

The seed decides prompts, moments and victims.  Answers and routes are compared with those of an undisturbed
run.  Engines run inside ``tests/faults/chaos.py``, which keeps books of what they hold.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop

from tests.faults.chaos import ENGINE
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.errors import ContextTooLong, NonFiniteLogits, RequestCancelled, RouteFailed, WorkerDied
from tokenflow.router import Router
from tokenflow.types import Completion
from tokenflow.wire.messages import Step, StepDone

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "demo"
RESULTS = Path(__file__).parent / "results" / "chaos.json"
MODELS = {"slm": "small", "llm": "large"}
TOKENS = 160
GONE_S = 3.0


class Broken(Exception):
    """Something is not as promised."""


def require(ok: object, what: str) -> None:
    if not ok:
        raise Broken(what)


class Question(NamedTuple):
    """A prompt with its sampling: every other one is seeded."""

    prompt: str
    sampling: dict[str, Any]


class Answer(NamedTuple):
    """What must not change."""

    tokens: list[int]
    models: list[str]
    text: str


def answer_of(completion: Completion) -> Answer:
    return Answer(completion.token_ids, completion.models, completion.text)


def questions(count: int, seed: int) -> list[Question]:
    rows = [json.loads(line) for line in (DEMO / "eval.jsonl").open(encoding="utf-8")]
    chosen = random.Random(seed).sample(rows, count)
    seeded = {"temperature": 0.8, "top_p": 0.95}
    return [
        Question(row["prompt"], {"max_tokens": TOKENS, **({**seeded, "seed": index} if index % 2 else {})})
        for index, row in enumerate(chosen)
    ]


def demo(folder: Path, lives: dict[str, list[dict[str, Any]]] | None = None, **config: Any) -> RecipeIR:
    """The demo recipe, its engines in the chaos wrapper; ``config`` is set for both models."""
    models = []
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml")
    for model in recipe.models:
        path = folder / model.name
        path.mkdir()
        for file in (DEMO / MODELS[model.name]).iterdir():
            (path / file.name).symlink_to(file)
        plan = {"engine": "torch", "lives": (lives or {}).get(model.name, [])}
        (path / "chaos.json").write_text(json.dumps(plan))
        models.append(replace(model, config=replace(model.config, path=str(path), engine=ENGINE, **config)))
    return replace(recipe, models=tuple(models))


def books(recipe: RecipeIR) -> dict[str, dict[str, int]]:
    """What each engine holds."""
    return {
        model.name: json.loads((Path(model.config.path) / "books").read_text()) for model in recipe.models
    }


class Steps:
    """Says when a model next completes a step."""

    def __init__(self) -> None:
        self._next: dict[str, asyncio.Future[float]] = {}

    def __call__(self, model: str, step: Step, done: StepDone) -> None:
        waiting = self._next.pop(model, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(time.monotonic())

    def next(self, model: str) -> asyncio.Future[float]:
        return self._next.setdefault(model, asyncio.get_running_loop().create_future())


async def ask_all(router: Router, asked: Sequence[Question], concurrency: int) -> list[Answer]:
    answers: dict[int, Answer] = {}
    todo = iter(enumerate(asked))

    async def work() -> None:
        for index, question in todo:
            answers[index] = answer_of(await router.generate(question.prompt, **question.sampling))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answers[index] for index in range(len(asked))]


async def undisturbed(asked: Sequence[Question]) -> list[Answer]:
    with tempfile.TemporaryDirectory() as folder:
        async with Router(demo(Path(folder))) as router:
            return await ask_all(router, asked, 32)


@asynccontextmanager
async def load(router: Router, asked: Sequence[Question], expected: Sequence[Answer], concurrency: int):
    """So many requests run at all times, again and again; every answer is compared when this ends.

    Gives a counter of how many were answered, lost and wrong.
    """
    counts: Counter[str] = Counter()
    over = False

    async def work(offset: int) -> None:
        index = offset
        while not over:
            question = asked[index % len(asked)]
            try:
                answer = answer_of(await router.generate(question.prompt, **question.sampling))
            except Exception as error:
                counts["lost"] += 1
                print(f"lost: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                counts["answered"] += 1
                if answer != expected[index % len(asked)]:
                    counts["wrong"] += 1
                    print(f"wrong: {question} {answer}", file=sys.stderr)
            index += concurrency

    async with asyncio.TaskGroup() as tasks:
        for offset in range(concurrency):
            tasks.create_task(work(offset))
        try:
            yield counts
        finally:
            over = True


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(seconds)
    at = lambda share: round(ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3, 1)  # noqa: E731
    return {"p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}


def supervisors(router: Router) -> dict[str, Any]:
    assert router._system is not None
    return {actor.model.name: actor.supervisor for actor in router._system.actors.values()}


async def kills(options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILLs of random workers under 32 concurrent requests."""
    dice = random.Random(options.seed)
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    ready, recovered, steps = [], [], Steps()
    with tempfile.TemporaryDirectory() as folder:
        async with Router(demo(Path(folder)), observer=steps) as router:
            victims = supervisors(router)
            rss = [psutil.Process().memory_info().rss]
            started = time.monotonic()
            async with load(router, asked, expected, 32) as counts:
                for _ in range(options.kills):
                    await asyncio.sleep(dice.uniform(0.05, 0.5))
                    name, victim = dice.choice(sorted(victims.items()))
                    worker = await victim.ready()
                    killed = time.monotonic()
                    os.kill(worker.pid, signal.SIGKILL)
                    await worker.died.wait()
                    await victim.ready()
                    ready.append(time.monotonic() - killed)
                    recovered.append(await steps.next(name) - killed)
                    rss.append(psutil.Process().memory_info().rss)
            seconds = time.monotonic() - started
    require(not counts["lost"] and not counts["wrong"], f"requests were lost or changed: {dict(counts)}")
    return {
        "kills": options.kills,
        "seconds": round(seconds, 1),
        "answered": counts["answered"],
        "lost": counts["lost"],
        "different": counts["wrong"],
        "until_ready": quantiles(ready),
        "until_first_step": quantiles(recovered),
        "router_rss_mib": [round(rss[0] / 2**20), round(rss[-1] / 2**20)],
    }


async def cancels(options: argparse.Namespace) -> dict[str, Any]:
    """Requests cancelled at random moments: while they wait, run, or are pending; as tasks or as streams."""
    dice = random.Random(options.seed)
    asked = questions(64, options.seed)
    expected = await undisturbed(asked[:1])
    outcomes: Counter[str] = Counter()
    asyncio.get_running_loop().set_debug(True)
    asyncio.get_running_loop().slow_callback_duration = 10.0
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), max_requests=16)
        async with Router(recipe) as router:
            await router.generate("Q: 1*1=?\nA: ", max_tokens=4)
            tasks_before = len(asyncio.all_tasks())
            todo = iter(range(options.cancels))

            async def work() -> None:
                for number in todo:
                    outcomes[await cancelled(router, asked[number % len(asked)], number, dice)] += 1

            started = time.monotonic()
            await asyncio.gather(*(work() for _ in range(48)))
            seconds = time.monotonic() - started
            await asyncio.sleep(2.0)
            held = books(recipe)
            system = router._system
            assert system is not None
            left = {"active": system.active, "queued": system.queued, "booked": len(system._ledger)}
            tasks = len(asyncio.all_tasks()) - tasks_before
            answer = answer_of(await router.generate(asked[0].prompt, **asked[0].sampling))
    require(all(book == {"open": 0, "tokens": 0} for book in held.values()), f"engines hold {held}")
    require(not any(left.values()), f"the router holds {left}")
    require(not tasks, f"{tasks} tasks are left")
    require(answer == expected[0], "the next request is answered otherwise")
    return {
        "cancels": options.cancels,
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(outcomes.items())),
        "engines_after_2_s": held,
        "router_after_2_s": left,
        "tasks_left": tasks,
        "next_answer": "identical",
    }


async def cancelled(router: Router, question: Question, number: int, dice: random.Random) -> str:
    """Cancel a request after a random time, in one of four ways; returns what became of it."""
    response = router.stream(question.prompt, **question.sampling)
    delay = dice.expovariate(1 / 0.03)
    match number % 4:
        case 0:
            waiting = asyncio.ensure_future(response.completion())
            await asyncio.sleep(delay)
            waiting.cancel()
        case 1:
            waiting = asyncio.ensure_future(response.completion())
            await asyncio.sleep(delay)
            response.close()
        case 2:
            waiting = asyncio.ensure_future(some_of(response, dice.randrange(1, 40)))
        case _:
            waiting = asyncio.ensure_future(response.completion())
            await asyncio.sleep(delay)
            await response.aclose()
    try:
        await waiting
    except asyncio.CancelledError:
        return "task cancelled"
    except RequestCancelled:
        return "closed"
    return "left its stream" if number % 4 == 2 else "answered before"


async def some_of(response: Any, events: int) -> None:
    """Read some events of a stream, then leave it."""
    async with response:
        async for _ in response:
            events -= 1
            if not events:
                break


async def stops(options: argparse.Namespace) -> dict[str, Any]:
    """SIGSTOP of each worker under load: it is found, dumped and replaced."""
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    found, limit, steps = [], 2.0, Steps()
    with tempfile.TemporaryDirectory() as folder:
        async with Router(demo(Path(folder), step_timeout=limit), observer=steps) as router:
            async with load(router, asked, expected, 32) as counts:
                for name, victim in list(supervisors(router).items()) * 5:
                    await asyncio.sleep(0.3)
                    worker = await victim.ready()
                    os.kill(worker.pid, signal.SIGSTOP)
                    stopped = time.monotonic()
                    await worker.died.wait()
                    require(
                        "no answer within" in str(worker.error), f"it died of something else: {worker.error}"
                    )
                    await victim.ready()
                    found.append(await steps.next(name) - stopped)
    require(not counts["lost"] and not counts["wrong"], f"requests were lost or changed: {dict(counts)}")
    return {
        "stops": len(found),
        "step_timeout_s": limit,
        "answered": counts["answered"],
        "lost": counts["lost"],
        "different": counts["wrong"],
        "until_first_step": quantiles(found),
    }


async def orphans(options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL of the router, while it loads and while it answers: nothing of it lives on."""
    gone: dict[str, float] = {}
    for when in ("loading", "answering"):
        command = [sys.executable, "-m", "tokenflow.cli", "run", str(ROOT / "recipes" / "demo.yaml")]
        router = subprocess.Popen(
            [*command, "--input", str(DEMO / "eval.jsonl")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        process = psutil.Process(router.pid)
        if when == "answering":
            assert router.stdout is not None
            router.stdout.readline()
        while not (children := process.children(recursive=True)):
            await asyncio.sleep(0.01)
        router.kill()
        started = time.monotonic()
        _, alive = psutil.wait_procs(children, timeout=GONE_S)
        gone[when] = round(time.monotonic() - started, 3)
        alive = [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
        router.wait()
        require(not alive, f"alive {GONE_S:g} s after the router was killed while {when}: {alive}")
    return {"seconds_until_gone": gone}


async def loading(options: argparse.Namespace) -> dict[str, Any]:
    """A worker that dies while loading: the error comes soon, with its last words."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), {"llm": [{"die_loading": 7}]})
        try:
            async with Router(recipe):
                raise Broken("it started")
        except WorkerDied as error:
            after = time.time() - (Path(recipe.models[1].config.path) / "lives").stat().st_mtime
            require("exit code 7; its last words:\n  chaos: dies while loading" in str(error), str(error))
    require(after < 5, f"the error came {after:.1f} s after the death")
    return {"seconds_until_error": round(after, 3), "error_has_its_stderr": True}


async def memory(options: argparse.Namespace) -> dict[str, Any]:
    """KV cache for four requests and 64 clients: all finish, with the same text, in bounded time."""
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    longest = max(len(answer.tokens) for answer in expected) + 80
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), kv_cache=4 * longest)
        async with Router(recipe) as router:
            started = time.monotonic()
            done = await asyncio.gather(
                *(router.generate(question.prompt, **question.sampling) for question in asked)
            )
            seconds = time.monotonic() - started
    require([answer_of(completion) for completion in done] == expected, "answers changed")
    waits = [completion.timing.ttft_s for completion in done]
    service = [completion.timing.latency_s - completion.timing.ttft_s for completion in done]
    bound = 64 / 4 * max(service)
    require(max(waits) <= bound, f"somebody waited {max(waits):.1f} s; 16 turns take {bound:.1f} s")
    return {
        "clients": 64,
        "kv_cache_tokens": 4 * longest,
        "seconds": round(seconds, 2),
        "different": 0,
        "wait": quantiles(waits),
        "longest_service_ms": round(max(service) * 1e3, 1),
        "served_in_order_of_arrival": waits == sorted(waits),
    }


async def mixed(options: argparse.Namespace) -> dict[str, Any]:
    """Three requests that go wrong among thirty: NaN logits, a route that raises, a prompt too long."""
    asked = questions(27, options.seed)
    expected = await undisturbed(asked)
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), {"slm": [{"nan_prompt": "NaN"}]})
        route = load_recipe(ROOT / "bench" / "faulty_route.py", []).python["slm"]
        recipe = replace(recipe, routes={"llm": recipe.routes["llm"]}, python={"slm": route})
        async with Router(recipe) as router:
            results = await asyncio.gather(
                *(router.generate(question.prompt, **question.sampling) for question in asked),
                router.generate("Q: NaN\nA: ", max_tokens=40),
                router.generate("Q: 93*7=?\nA: ", max_tokens=40, logit_bias={}, params={"fault": 1}),
                router.generate("Q: " + "9" * 5000, max_tokens=40),
                return_exceptions=True,
            )
    *good, nan, raised, long = results
    kinds = [type(result).__name__ for result in (nan, raised, long)]
    require(
        isinstance(nan, NonFiniteLogits)
        and isinstance(raised, RouteFailed)
        and isinstance(long, ContextTooLong),
        f"the wrong ones ended with {kinds}",
    )
    require(not any(isinstance(result, BaseException) for result in good), "a good one failed")
    require([answer_of(result) for result in good] == expected, "a good one changed")
    return {"good": len(good), "different": 0, "failed": kinds}


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Answers, cancels and preemptions for a long time: memory stays flat."""
    dice = random.Random(options.seed)
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    samples: list[tuple[float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), kv_cache=12 * 300, max_requests=16)
        async with Router(recipe) as router:
            processes = {"router": psutil.Process()}
            processes |= {name: psutil.Process(victim.pid) for name, victim in supervisors(router).items()}
            started = time.monotonic()
            async with load(router, asked, expected, 16) as counts:
                number = 0
                while (now := time.monotonic() - started) < options.duration:
                    if number % 50 == 0:
                        gc.collect()
                        rss = {name: process.memory_info().rss / 2**20 for name, process in processes.items()}
                        samples.append((now, rss))
                    await cancelled(router, asked[number % len(asked)], number, dice)
                    number += 1
    require(not counts["lost"] and not counts["wrong"], f"requests were lost or changed: {dict(counts)}")
    steady = [sample for sample in samples if sample[0] > options.duration / 5]
    slopes = {
        name: round(
            statistics.linear_regression([t / 3600 for t, _ in steady], [rss[name] for _, rss in steady])[0],
            2,
        )
        for name in processes
    }
    return {
        "seconds": options.duration,
        "answered": counts["answered"],
        "cancelled": number,
        "lost": counts["lost"],
        "different": counts["wrong"],
        "rss_mib": {
            name: [round(samples[0][1][name], 1), round(samples[-1][1][name], 1)] for name in processes
        },
        "slope_mib_per_hour": slopes,
    }


Scenario = Callable[[argparse.Namespace], Awaitable[dict[str, Any]]]
SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario for scenario in (kills, cancels, stops, orphans, loading, memory, mixed, soak)
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    name: str
    ok: bool
    seconds: float
    facts: dict[str, Any]

    def __str__(self) -> str:
        facts = "; ".join(f"{key} {value}" for key, value in self.facts.items())
        return f"{self.name:10} {'ok' if self.ok else 'BROKEN':7} {self.seconds:7.1f} s  {facts}"


def run(name: str, options: argparse.Namespace) -> Row:
    started = time.monotonic()
    loop = None if name == "cancels" else uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            facts, ok = runner.run(SCENARIOS[name](options)), True
    except Broken as error:
        facts, ok = {"broken": str(error)}, False
    return Row(name, ok, time.monotonic() - started, facts)


def main() -> int:
    """Run scenarios, print the table, keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="*", choices=[[], *SCENARIOS], help="all but the soak")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--cancels", type=int, default=5000)
    parser.add_argument("--duration", type=float, default=300.0, help="of the soak, in seconds")
    options = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = []
    for name in options.scenario or [name for name in SCENARIOS if name != "soak"]:
        row = run(name, options)
        print(row, flush=True)
        rows.append(row)
        kept[name] = {"ok": row.ok, "seed": options.seed, "took_s": round(row.seconds, 1), **row.facts}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
