"""What the runtime costs beside the models: efficiency, hand-offs, and where the time of a step goes.

::

    python -m bench.overhead [--seconds 8]

- *efficiency* (simulated, 6.0 and 27.9 ms, p = 0.35): measured throughput at the best thresholds over the
  model's, T(B*), which knows nothing but the latencies; both on the same routes.
- *hand-off* (simulated, N = 1, where the peer is always idle): from the end of one model's step in its worker
  to the start of the peer's batch in the other.
- *step*: the small model's cycle where one step follows the other, from its start to the start of the next.
  *forward* is the model; *channel* is what passes between a worker's clock and the router's, both ways;
  *scheduling* is the router between a reply and the next step; *other* is the worker around its forward pass.
  Simulated at 6.0 ms, and run with 29 M random weights on one CPU core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.shapes import MID, write_model
from bench.simulated import P, recipe, routing_model, run
from tokenflow.actors.process import WorkerProcess
from tokenflow.eventloop import new_event_loop
from tokenflow.planner import Thresholds, best_thresholds
from tokenflow.router import Router
from tokenflow.wire.messages import Step, StepDone, ToRouter

RESULTS = Path(__file__).parent / "results" / "overhead.json"
CONCURRENCY = (1, 2, 3, 4, 8, 16)
TOGETHER_S = 1e-3
"""A step that starts later than this after the last one had to wait for requests."""


@dataclass
class Clock:
    """When frames left and came, on the router's clock; workers use the same monotonic one."""

    sent: dict[tuple[str, int], float] = field(default_factory=dict)
    read: dict[tuple[str, int], float] = field(default_factory=dict)


@contextmanager
def watched() -> Iterator[Clock]:
    """Note when every step is sent and its reply read."""
    clock, send, receive = Clock(), WorkerProcess.step, WorkerProcess.received

    def step(self: WorkerProcess, message: Step) -> asyncio.Future[StepDone]:
        answer = send(self, message)
        clock.sent[self.hello.model, message.id] = time.monotonic()
        return answer

    def received(self: WorkerProcess, message: ToRouter) -> None:
        if isinstance(message, StepDone):
            clock.read[self.hello.model, message.id] = time.monotonic()
        receive(self, message)

    WorkerProcess.step, WorkerProcess.received = step, received  # type: ignore[method-assign, assignment]
    try:
        yield clock
    finally:
        WorkerProcess.step, WorkerProcess.received = send, receive  # type: ignore[method-assign]


def efficiency(seconds: float) -> list[dict[str, Any]]:
    """Measured over predicted at the best thresholds."""
    rows = []
    for n in CONCURRENCY:
        plan = best_thresholds(routing_model(), n)
        batching = {"policy": "fixed", "thresholds": dict(zip(("slm", "llm"), plan.thresholds, strict=True))}
        found = run(
            recipe(batching=batching), n, seconds, routing_model(), Thresholds(plan.thresholds), P, False
        )
        rows.append(
            {
                "concurrency": n,
                "thresholds": plan.thresholds,
                "bound_tokens_per_s": round(plan.tokens_per_s, 1),
                "tokens_per_s": round(plan.tokens_per_s * found.ratio, 1),
                "efficiency": round(found.ratio, 4),
                "half_width": round(found.half_width, 4),
                "elsewhere_cores": round(found.elsewhere, 3),
            }
        )
    return rows


async def _steps(given: Mapping[str, Any], concurrency: int, prompt: Sequence[int], tokens: int) -> list[Any]:
    steps: list[tuple[str, Step, StepDone]] = []

    def note(model: str, step: Step, done: StepDone) -> None:
        if done.rows:
            steps.append((model, step, done))

    async with Router(given, observer=note) as router:
        await router.generate_many(
            [list(prompt)] * concurrency, concurrency=concurrency, max_tokens=tokens, ignore_eos=True
        )
    return steps


def breakdown(
    name: str, given: Mapping[str, Any], concurrency: int, prompt: Sequence[int], tokens: int
) -> dict[str, Any]:
    """Milliseconds of the small model's cycles that follow each other at once, and the share of each part."""
    with watched() as clock, asyncio.Runner(loop_factory=new_event_loop) as runner:
        steps = [
            entry for entry in runner.run(_steps(given, concurrency, prompt, tokens)) if entry[0] == "slm"
        ]
    parts: dict[str, list[float]] = {part: [] for part in ("forward", "channel", "scheduling", "other")}
    cycles = []
    for (model, step, done), (_, following, after) in pairwise(steps):
        if step.open or following.open or after.started - done.ended > TOGETHER_S:
            continue
        cycles.append(after.started - done.started)
        parts["forward"].append(done.forward_s)
        if done.ahead:  # the worker went on by itself: nothing passed between the two steps
            parts["channel"].append(0.0)
            parts["scheduling"].append(0.0)
            parts["other"].append(cycles[-1] - done.forward_s)
            continue
        read, sent = clock.read[model, step.id], clock.sent[model, following.id]
        parts["channel"].append((read - done.ended) + (after.started - sent))
        parts["scheduling"].append(sent - read)
        parts["other"].append(done.ended - done.started - done.forward_s)
    cycle = statistics.fmean(cycles)
    return {
        "what": name,
        "concurrency": concurrency,
        "cycles": len(cycles),
        "cycle_ms": round(cycle * 1e3, 3),
        **{f"{part}_ms": round(statistics.fmean(times) * 1e3, 3) for part, times in parts.items()},
        **{f"{part}_share": round(statistics.fmean(times) / cycle, 4) for part, times in parts.items()},
    }


def handoffs(tokens: int) -> dict[str, float]:
    """Microseconds from the end of a step to the start of the peer's, at N = 1."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        steps = runner.run(_steps(recipe(), 1, [1, 2, 3], tokens))
    gaps = [
        (after.started - done.ended) * 1e6
        for (model, _, done), (other, _, after) in pairwise(steps)
        if model != other
    ]
    cuts = statistics.quantiles(gaps, n=100)
    return {"handoffs": len(gaps), **{f"p{q}_us": round(cuts[q - 1], 1) for q in (50, 90, 99)}}


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each efficiency run (8)")
    parser.add_argument("--only", choices=("efficiency", "handoff", "step"), help="one part; others are kept")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result: dict[str, Any] = {**kept, "machine": platform.processor() or platform.machine()}
    if options.only in (None, "efficiency"):
        result["efficiency_simulated"] = efficiency(options.seconds)
    if options.only in (None, "handoff"):
        result["handoff_simulated"] = handoffs(400)
    if options.only in (None, "step"):
        result["slm_step"] = [
            breakdown("simulated, 6.0 ms", recipe(p=0.05), n, [1, 2, 3], tokens)
            for n, tokens in ((1, 300), (4, 200), (16, 150))
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = str(write_model(Path(folder), MID))
            real = {
                "name": "overhead",
                "entry": "slm",
                "models": {"slm": {"path": path}, "llm": {"path": path}},
                "routes": {"slm": [{"when": "entropy > 1.5", "to": "llm", "send": "drop_last"}]},
            }
            result["slm_step"] += [breakdown("29 M weights, CPU", real, n, [5] * 240, 120) for n in (1, 4, 8)]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


def report(result: Mapping[str, Any]) -> None:
    """Print what is there."""
    print("efficiency, simulated: N, thresholds, bound T(B*), tokens/s, efficiency")
    for row in result.get("efficiency_simulated", ()):
        print(
            f"{row['concurrency']:3} {tuple(row['thresholds'])!s:8} {row['bound_tokens_per_s']:7.1f}"
            f" {row['tokens_per_s']:7.1f} {row['efficiency']:.4f} ±{row['half_width']:.4f}"
        )
    if "handoff_simulated" in result:
        print(f"hand-off to an idle peer, simulated: {result['handoff_simulated']}")
    print("the small model's step, ms (share of its cycle)")
    for row in result.get("slm_step", ()):
        parts = ", ".join(
            f"{part} {row[f'{part}_ms']:.3f} ({row[f'{part}_share']:.1%})"
            for part in ("forward", "scheduling", "channel", "other")
        )
        print(f"  {row['what']}, N = {row['concurrency']}: {row['cycle_ms']:.3f}: {parts}")


if __name__ == "__main__":
    main()
