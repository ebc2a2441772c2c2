"""What ``policy: auto`` makes of a load that it does not know, and of one that changes.

::

    python -m bench.auto [--only simulated|demo]

- *simulated* (6.0 and 27.9 ms): started with wrong assumptions (9.0 and 9.5 ms, half of the small model's
  tokens handed over) under 16 requests with p = 0.05; then p becomes 0.5; then 14 of the requests end, and
  then one more.  Throughput is counted from 20 s after each change on (5 s for the last), and compared with
  that of the best fixed thresholds.  Routes are random, and a single request's speed follows them; so beside
  it stands how busy the models are, which does not: one request waits for nothing else.
- *demo*: the demo pair on the CPU at 1, 4 and 16 requests: eager starts, the best fixed thresholds according
  to what was measured, and ``auto`` from the first request on: in the first half of the time, when it plans,
  and in the second.  The planner's processor time is counted too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from bench.simulated import PROMPT, Log, busy_elsewhere, recipe, routing_model
from tokenflow.eventloop import new_event_loop
from tokenflow.planner import best_thresholds
from tokenflow.router import Router

RESULTS = Path(__file__).parent / "results" / "auto.json"
RECIPES = Path(__file__).parents[1] / "recipes"
WRONG = {"latency_ms": {"slm": 9.0, "llm": 9.5}, "routing": {"slm": {"llm": 0.5}}}
SETTLE_S, COUNT_S, BIN_S = 20.0, 6.0, 2.5
TOKENS = 100
NAMES = ("slm", "llm")


@dataclass
class Load:
    """Requests one after another, so many at a time; what they are may be changed while they run."""

    router: Router
    prompts: Sequence[Any]
    concurrency: int
    options: dict[str, Any]
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def start(self, tasks: TaskGroup) -> None:
        """Begin; whoever is above the concurrency that is wanted ends with its request."""
        for place in range(self.concurrency):
            tasks.start_soon(self._ask, place)

    async def _ask(self, place: int) -> None:
        while place < self.concurrency:
            number = next(self.numbers)
            await self.router.generate(self.prompts[number % len(self.prompts)], seed=number, **self.options)


@asynccontextmanager
async def loaded(given: Any, log: Log, prompts: Sequence[Any], concurrency: int, **options: Any) -> Any:
    """A router under a load, which ends with it."""
    async with Router(given, observer=log) as router, anyio.create_task_group() as tasks:
        load = Load(router, prompts, concurrency, options)
        load.start(tasks)
        try:
            yield load
        finally:
            tasks.cancel_scope.cancel()


async def fixed(p: float, concurrency: int, thresholds: Sequence[int]) -> tuple[float, float]:
    """Tokens/s of simulated models with fixed thresholds, and how many of them run on average."""
    log, batching = Log(), {"policy": "fixed", "thresholds": dict(zip(NAMES, thresholds, strict=True))}
    given = recipe(p=p, batching=batching)
    async with loaded(given, log, [PROMPT], concurrency, max_tokens=TOKENS, params={"p": p}):
        await asyncio.sleep(2.0)
        return await counted(log, COUNT_S)


async def counted(log: Log, seconds: float) -> tuple[float, float]:
    """Tokens/s from now on, and how many models run on average."""
    begin = asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    end = begin + seconds
    inside = [min(done.ended, end) - max(done.started, begin) for _, done in log.steps]
    return log.rate(begin, end), sum(max(time, 0.0) for time in inside) / seconds


async def simulated() -> dict[str, Any]:
    """Follow a load that changes three times."""
    phases = [(0.05, 16), (0.5, 16), (0.5, 2), (0.5, 1)]
    best = [best_thresholds(routing_model(p=p), n).thresholds for p, n in phases]
    references = [await fixed(p, n, b) for (p, n), b in zip(phases, best, strict=True)]
    log, rows = Log(), []
    given = recipe(p=phases[0][0], batching={"policy": "auto", "assume": WRONG})
    async with loaded(given, log, [PROMPT], 16, max_tokens=TOKENS, params={"p": phases[0][0]}) as load:
        for (p, n), thresholds, (reference, running) in zip(phases, best, references, strict=True):
            load.options["params"], load.concurrency = {"p": p}, n
            settle_s = SETTLE_S if n > 1 else 2 * BIN_S
            bins = [(await counted(log, BIN_S))[0] / reference for _ in range(round(settle_s / BIN_S))]
            rate, busy = await counted(log, COUNT_S)
            policy = load.router.start_policy
            rows.append(
                {
                    "p": p,
                    "concurrency": n,
                    "best_fixed": thresholds,
                    "best_fixed_tokens_per_s": round(reference, 1),
                    "tokens_per_s": round(rate, 1),
                    "share_of_best_fixed": round(rate / reference, 4),
                    "models_running": round(busy, 4),
                    "models_running_of_best_fixed": round(busy / running, 4),
                    "share_by_2.5_s": [round(share, 3) for share in bins],
                    "policy": type(policy).__name__,
                    "thresholds": policy.thresholds,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    ends = sorted(done.ended for _, done in log.steps)
    return {"phases": rows, "longest_time_without_a_step_s": round(max(b - a for a, b in pairwise(ends)), 3)}


async def on_demo(
    batching: Mapping[str, Any], concurrency: int, seconds: float, prompts: Sequence[str]
) -> tuple[dict[str, Any], Any]:
    """The demo pair with a start policy; what it measured of itself."""
    overrides = [f"batching={json.dumps(batching)}"]
    log, before = Log(), resource.getrusage(resource.RUSAGE_CHILDREN)
    compiled = Router(RECIPES / "demo.yaml", overrides=overrides).recipe
    async with loaded(compiled, log, prompts, concurrency, max_tokens=200) as load:
        await asyncio.sleep(1.0)
        busy = busy_elsewhere()
        rates = [(await counted(log, seconds / 2))[0] for _ in range(2)]
        busy = (busy_elsewhere() - busy) / seconds
        model, policy = load.router.routing_model(), load.router.start_policy
        # Workers do not count before they have ended.
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    planner = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {
        "concurrency": concurrency,
        "policy": batching["policy"],
        "start_policy": type(policy).__name__,
        "thresholds": policy.thresholds,
        "tokens_per_s_by_half": [round(rate, 1) for rate in rates],
        "planner_s": round(planner, 2),
        "elsewhere_cores": round(busy, 2),
    }
    print(json.dumps(row), flush=True)
    return row, model


async def demo(seconds: float, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Eager, fixed and automatic starts on real engines."""
    with (RECIPES / "demo" / "eval.jsonl").open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    rows = []
    for n in numbers:
        eager, model = await on_demo({"policy": "eager"}, n, seconds, prompts)
        plan = best_thresholds(model, n)
        thresholds = dict(zip(NAMES, plan.thresholds, strict=True))
        planned, _ = await on_demo({"policy": "fixed", "thresholds": thresholds}, n, seconds, prompts)
        auto, _ = await on_demo({"policy": "auto"}, n, seconds, prompts)
        again, _ = await on_demo({"policy": "eager"}, n, seconds, prompts)
        rows += [{**eager, "predicted_gain_of_fixed": round(plan.gain, 3)}, planned, auto, again]
    return rows


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("simulated", "demo"), help="one part; the other is kept")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run of the demo (15)")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=(1, 4, 16), metavar="N", help="of the demo (1 4 16)"
    )
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result = {**kept, "machine": platform.processor() or platform.machine()}
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if options.only in (None, "simulated"):
            result["simulated"] = runner.run(simulated())
            print(f"longest time without a step: {result['simulated']['longest_time_without_a_step_s']} s")
        if options.only in (None, "demo"):
            result["demo"] = runner.run(demo(options.seconds, options.concurrency))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
