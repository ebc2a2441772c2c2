"""What each part of tokenflow is worth: R2R's routes on low effort, with one part after another taken away.

::

    python -m bench.ablation [--quick]

Like the table of the TokenRouter paper it is cumulative: each line lacks what those above it lack, too.

=======================  ====================================================================================
full                     as it comes: batches are planned while serving, with lookahead
no lookahead             thresholds planned once, from step times and routes that were measured before
no delayed batching      a model starts as soon as somebody waits for it
no asynchrony            one model runs at a time: in lock step, as a loop over both would
no handoff-resume        a request that leaves a model is closed there, and comes back as a new request,
                         whose tokens the prefix cache finds
one at a time            a request is sent when the one before it is answered
=======================  ====================================================================================

Each line runs in a process of its own, with its own workers; the lines take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec

from bench.compare import beside, bound, load, work
from bench.compare.__main__ import machine, model
from bench.compare.beside import ABLATION
from bench.compare.load import Emit
from bench.compare.on_tokenflow import Tokenflow
from bench.compare.servers import Server, open_all, stop_all
from tokenflow.actors.model import ModelActor
from tokenflow.actors.process import WorkerProcess
from tokenflow.wire.messages import Step, StepDone

LINES = (
    "full",
    "no lookahead",
    "no delayed batching",
    "no asynchrony",
    "no handoff-resume",
    "one at a time",
)
POLICIES = ("auto", "planned", "eager")
CONCURRENCIES = (8, 4, 1)
WORKLOAD = dataclasses.replace(work.LOW, rounds=1)
LIMIT_S = 6.0
LINE, ASSUME = "TOKENFLOW_BENCH_LINE", "TOKENFLOW_BENCH_ASSUME"


class Ablated(Tokenflow):
    """tokenflow without what the line that ``TOKENFLOW_BENCH_LINE`` names lacks, and those above it."""

    def __init__(self) -> None:
        super().__init__()
        line = LINES.index(os.environ[LINE])
        policy = POLICIES[min(line, len(POLICIES) - 1)]
        self.settings = {"batching.policy": policy}
        if policy == "planned":
            self.settings["batching.assume"] = os.environ[ASSUME]
        self._turn: asyncio.Lock | None = None
        if line >= LINES.index("no asynchrony"):
            _run_in_lock_step()
        if line >= LINES.index("no handoff-resume"):
            _close_what_leaves()
        if line >= LINES.index("one at a time"):
            self._turn = asyncio.Lock()

    async def generate(self, index: int, prompt: list[int], trace: str, variant: str, emit: Emit) -> None:
        async with AsyncExitStack() as stack:
            if self._turn is not None:
                await stack.enter_async_context(self._turn)
            await super().generate(index, prompt, trace, variant, emit)


def _run_in_lock_step() -> None:
    """Let one worker run at a time."""
    turn, step_of = asyncio.Lock(), WorkerProcess.step

    async def in_turn(worker: WorkerProcess, step: Step) -> StepDone:
        async with turn:
            # Nor does one go on by itself.
            return await step_of(worker, msgspec.structs.replace(step, least=0))

    def step(worker: WorkerProcess, step: Step) -> asyncio.Future[StepDone]:
        return asyncio.ensure_future(in_turn(worker, step))

    WorkerProcess.step = step  # type: ignore[method-assign, assignment]


def _close_what_leaves() -> None:
    """Let a model forget a request that it hands over."""
    hand_over = ModelActor._hand_over

    def and_forget(actor: ModelActor, sequence: Any, peer: int, request: Any) -> None:
        hand_over(actor, sequence, peer, request)
        if sequence.holder != actor.model.code:
            actor.forget(sequence)

    ModelActor._hand_over = and_forget  # type: ignore[method-assign, assignment]


def assumed(steps: Sequence[bound.Step], requests: Sequence[work.Request]) -> dict[str, Any]:
    """What ``planned`` is told: median step times by batch size, and where the requests of two models go."""
    latencies: dict[str, dict[int, float]] = {"m0": {}, "m1": {}}
    decodes: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        if step.computed < work.LOW.prompt:
            decodes.setdefault((step.model, step.rows), []).append(1e3 * step.forward_s)
    for (code, rows), times in sorted(decodes.items()):
        latencies[f"m{code}"][rows] = round(statistics.median(times), 3)
    steps_of, leaves, keeps = ({"a": 0, "b": 0} for _ in range(3))
    for request in requests:
        for letter, following in pairwise(request.trace + request.trace[-1]):
            here = letter.lower()
            leaving = following.lower() != here
            steps_of[here] += 1
            leaves[here] += leaving
            keeps[here] += leaving and letter.isupper()
    routing = {here: round(leaves[here] / steps_of[here], 4) for here in "ab"}
    commits = {here: round(keeps[here] / leaves[here], 4) for here in "ab"}
    return {
        "latency_ms": latencies,
        "routing": {"m0": {"m1": routing["a"]}, "m1": {"m0": routing["b"]}},
        "commits": {"m0": {"m1": commits["a"]}, "m1": {"m0": commits["b"]}},
    }


def measure(cells: Sequence[work.Cell], repetitions: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Runs by line and concurrency."""
    listed: list[work.Request] = []
    requests: dict[work.Cell, list[int]] = {}
    for cell in cells:
        requests[cell] = list(range(len(listed), len(listed) + cell.count))
        listed += work.requests(cell)
    found: dict[str, dict[str, list[dict[str, float]]]] = {line: {} for line in LINES}
    servers: dict[str, Server] = {}

    def run(line: str, cell: work.Cell, salt: str) -> dict[str, Any]:
        asked = {"requests": requests[cell], "concurrency": cell.concurrency, "salt": salt}
        return servers[line].ask(do="run", **asked, limit_s=LIMIT_S, variant="visit")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        work.save(listed, file)
        try:
            for line in LINES:
                os.environ[LINE] = line
                log = Path(folder) / f"{line}.log"
                servers[line] = Server("ablated", Path(sys.executable), file, log)
                open_all([servers[line]], [model(name) for name in cells[0].models.shapes], "bfloat16")
                # Plans settle while serving.
                warm = run(line, cells[0], "warm")
                if line == LINES[0]:
                    steps = [bound.Step(*step) for step in warm["notes"]["steps"]]
                    os.environ[ASSUME] = json.dumps(assumed(steps, work.requests(cells[0])))
            for repetition, cell, line in product(range(repetitions), cells, LINES):
                answer = run(line, cell, str(repetition))
                records = [load.Record(**record) for record in answer["records"]]
                at_a_time = 1 if line == "one at a time" else cell.concurrency
                figures = load.measure(answer["elapsed_s"], records, at_a_time)
                kept = {"decode": figures.decode, "end_to_end": figures.end_to_end}
                found[line].setdefault(str(cell.concurrency), []).append(kept)
                print(f"#{repetition} {cell.name:28} {line:20} {figures.decode:8.1f} tok/s", flush=True)
        finally:
            stop_all(list(servers.values()))
    return found


def main() -> None:
    """Measure, print the table, and keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one repetition at concurrency 4")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--results", type=Path, default=ABLATION, help="replaced")
    options = parser.parse_args()
    # Servers are stopped, too, when this program is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    concurrencies = (4,) if options.quick else CONCURRENCIES
    cells = [work.Cell("r2r", work.SMALL_PAIR, WORKLOAD, number) for number in concurrencies]
    found = measure(cells, 1 if options.quick else options.repetitions)
    options.results.write_text(json.dumps({"machine": machine(), "lines": found}, indent=1) + "\n")
    print(beside.ablation(options.results))


if __name__ == "__main__":
    main()
