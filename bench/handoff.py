"""What a hand-off costs, and how much of the small model's step is its forward pass.

::

    python -m bench.handoff

Hand-off: on the demo pair at concurrency 1, where the peer is always idle, the time from the end of one
model's step in its worker to the start of the peer's batch in the other worker (both on the machine's
monotonic clock).  Share: a recipe with an entropy rule that never fires, on the 29 M random model; the time
from the start of one step to the start of the next is compared with the engine's share of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from bench.shapes import MID, write_model
from tokenflow.router import Router
from tokenflow.wire.messages import Step, StepDone

RESULTS = Path(__file__).parent / "results" / "handoff.json"
DEMO = Path(__file__).parents[1] / "recipes" / "demo"


class Log:
    """Every step, in the order in which their replies came."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, StepDone]] = []

    def __call__(self, model: str, step: Step, done: StepDone) -> None:
        if step.rows:
            self.steps.append((model, done))


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Microseconds: median, 90th and 99th percentile."""
    cuts = statistics.quantiles(seconds, n=100)
    return {f"p{q}_us": round(cuts[q - 1] * 1e6, 1) for q in (50, 90, 99)}


async def handoffs(prompts: Sequence[str]) -> dict[str, Any]:
    """Times from the end of a step to the start of the peer's, for every hand-off."""
    log = Log()
    async with Router(DEMO.parent / "demo.yaml", observer=log) as router:
        for prompt in prompts:
            await router.generate(prompt, max_tokens=400)
    gaps = [
        after.started - before.ended
        for (first, before), (second, after) in pairwise(log.steps)
        if first != second and before.rows[0].rule >= 0
    ]
    return {"handoffs": len(gaps), **quantiles(gaps)}


async def share(folder: Path, batch: int, tokens: int) -> dict[str, Any]:
    """The forward pass as a share of the whole cycle of a step, worker and router included."""
    log = Log()
    recipe = {
        "name": "share",
        "entry": "slm",
        "models": {"slm": {"path": str(folder)}, "llm": {"path": str(folder)}},
        "routes": {"slm": [{"when": "entropy > 1.5", "to": "llm", "send": "drop_last"}]},
    }
    async with Router(recipe, observer=log) as router:
        prompts = [[5 + index] * 240 for index in range(batch)]
        await router.generate_many(prompts, concurrency=batch, max_tokens=tokens, ignore_eos=True)
    full = [done for _, done in log.steps if len(done.rows) == batch and done.computed == batch]
    cycles = [(after.started - before.started, before) for before, after in pairwise(full)]
    shares = [done.forward_s / cycle for cycle, done in cycles]
    return {
        "batch": batch,
        "steps": len(cycles),
        "cycle_ms": round(statistics.median(cycle for cycle, _ in cycles) * 1e3, 3),
        "forward_ms": round(statistics.median(done.forward_s for _, done in cycles) * 1e3, 3),
        "worker_ms": round(statistics.median(done.ended - done.started for _, done in cycles) * 1e3, 3),
        "share_p50": round(statistics.median(shares), 4),
    }


async def measure() -> dict[str, Any]:
    rows = [json.loads(line) for line in (DEMO / "eval.jsonl").open(encoding="utf-8")]
    result: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "handoff": await handoffs([row["prompt"] for row in rows[:120]]),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), MID)
        result["slm_step"] = [await share(model, batch, 160) for batch in (1, 8)]
    return result


def main() -> None:
    """Measure, print, and keep the figures."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(measure())
    handoff = result["handoff"]
    print(
        f"hand-off to an idle peer: p50 {handoff['p50_us']} us, p90 {handoff['p90_us']} us, "
        f"p99 {handoff['p99_us']} us over {handoff['handoffs']} hand-offs"
    )
    for row in result["slm_step"]:
        print(
            f"29 M model, batch {row['batch']}: cycle {row['cycle_ms']} ms, worker {row['worker_ms']} ms, "
            f"forward {row['forward_ms']} ms = {row['share_p50']:.1%} of the cycle"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
