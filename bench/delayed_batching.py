"""Measured against predicted throughput on simulated models: thresholds, and lookahead.

::

    python -m bench.delayed_batching [--budget SECONDS] [--only sweep|grid|resonance] [--report]

Everything is simulated: models that sleep, through the real router, processes and channels.  It needs a
quiet machine and a long time.  So it measures cell by cell, keeps what it has in
``bench/results/delayed_batching.json``, stops after its budget, and goes on where it stopped.  What was
measured while other programs took more than 15 % of a core is measured again, up to three times, and the
cells of the sweep go on, on further routes: three times at least (the machine is slower at times, for half a
minute or so, of which the intervals know nothing), and until their interval is below 1 %.

- *sweep*: the paper's latencies (6.0 and 27.9 ms, p = 0.35); N = 1 to 16, all thresholds
  of the large model.
- *grid*: the best static thresholds and the lookahead policy; N in {2, 4, 8, 16}, p in {0.05, 0.2, 0.35,
  0.5}, the large model 2.02, 4.65 and 10 times as slow.
- *resonance*: N = 8, p = 0.35, 60.0 and 121.0 ms, where a small step narrowly misses the returning batch.

All cells of one N and p run the same seeded routes, and the prediction replays them.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.simulated import LARGE_MS, SMALL_MS, Measured, P, pooled, recipe, routing_model, run
from tokenflow.chart import Chart, Line, write_chart
from tokenflow.planner import Lookahead, StartPolicy, Thresholds, optimum, policy_throughput
from tokenflow.planner.search import PolicyPlan, best_policy

FOLDER = Path(__file__).parent / "results"
RESULTS, PLOT = FOLDER / "delayed_batching.json", FOLDER / "delayed_batching.svg"
SWEEP = (1, 2, 3, 4, 8, 16)
GRID = (2, 4, 8, 16)
PROBABILITIES = (0.05, 0.2, 0.35, 0.5)
RATIOS = (2.02, 4.65, 10.0)
RESONANCE_MS = (60.0, 121.0)
BUSY, TRIES = 0.15, 4
PRECISE, LEAST_RUNS, MOST_RUNS, LONGEST_S = 0.01, 3, 8, 100.0


@dataclass(frozen=True)
class Cell:
    """One run: which part of the benchmark, and with what; without thresholds, the best ones."""

    part: str
    concurrency: int
    p: float
    latency_ms: tuple[float, float]
    seconds: float
    thresholds: tuple[int, ...] = ()
    lookahead: bool = False

    @property
    def key(self) -> str:
        """What tells it from the others."""
        policy = ",".join(map(str, self.thresholds)) or ("lookahead" if self.lookahead else "static")
        small, large = self.latency_ms
        return f"{self.part} N={self.concurrency} p={self.p} {small}/{large} {policy}"


@cache
def plan(concurrency: int, p: float, latency_ms: tuple[float, float]) -> PolicyPlan:
    """The best policies of one setting."""
    return best_policy(routing_model(latency_ms, p), concurrency)


def cells() -> Iterator[Cell]:
    """All of them, in order."""
    paper = SMALL_MS, LARGE_MS
    for n in SWEEP:
        small, _ = plan(n, P, paper).static.thresholds
        for large in range(1, n - small + 2):
            yield Cell("sweep", n, P, paper, 16.0 if n < 16 else 8.0, (small, large))
    for n in GRID:
        for p in PROBABILITIES:
            for ratio in RATIOS:
                latency_ms = SMALL_MS, round(SMALL_MS * ratio, 4)
                for lookahead in (False, True):
                    yield Cell("grid", n, p, latency_ms, 2.5, lookahead=lookahead)
    for lookahead in (False, True):
        yield Cell("resonance", 8, P, RESONANCE_MS, 40.0, lookahead=lookahead)


def measure(cell: Cell, seconds: float, first_seed: int) -> tuple[Cell, Measured, float]:
    """Run one cell: with the thresholds that were found, what was measured, and the tokens/s predicted."""
    model = routing_model(cell.latency_ms, cell.p)
    found = plan(cell.concurrency, cell.p, cell.latency_ms)
    best = found.lookahead if cell.lookahead else found.static
    cell = replace(cell, thresholds=cell.thresholds or best.thresholds)
    policy: StartPolicy = Thresholds(cell.thresholds)
    batching: dict[str, Any] = {
        "policy": "fixed", "thresholds": dict(zip(("slm", "llm"), cell.thresholds, strict=True)),
    }  # fmt: skip
    if cell.lookahead:
        policy = Lookahead.of(model, cell.concurrency, cell.thresholds)
        batching = {"policy": "lookahead"}
    given = recipe(cell.latency_ms, cell.p, batching)
    measured = run(given, cell.concurrency, seconds, model, policy, cell.p, cell.lookahead, first_seed)
    return cell, measured, policy_throughput(model, policy, cell.concurrency).tokens_per_s


def further(cell: Cell, before: dict[str, Any] | None) -> tuple[float, dict[str, Any] | None]:
    """How many seconds a cell is yet to be measured, 0 if it is settled, and the part of it to build on."""
    if before is None or (before["elsewhere"] > BUSY and before["tries"] < TRIES):
        return cell.seconds, None
    unsettled = before["half_width"] > PRECISE or before["runs"] < LEAST_RUNS
    if cell.part == "sweep" and unsettled and before["tries"] < MOST_RUNS:
        missing = before["seconds"] * ((before["half_width"] / PRECISE) ** 2 - 1)
        return min(max(1.2 * missing, cell.seconds / 2), LONGEST_S), before
    return 0.0, before


def measured_again(cell: Cell, seconds: float, built_on: dict[str, Any] | None) -> dict[str, Any]:
    """A cell after so many more seconds; quiet runs on different routes are counted together."""
    runs = built_on["runs"] if built_on else 0
    settled, measured, predicted = measure(cell, seconds, runs * cell.concurrency)
    if built_on and measured.elsewhere <= BUSY:
        past = {each.name: built_on[each.name] for each in fields(Measured)}
        measured, runs = pooled(Measured(**past), measured), runs + 1
    elif built_on:
        return built_on
    else:
        runs = 1
    return {**asdict(settled), **asdict(measured), "predicted": predicted, "runs": runs}


def main() -> None:
    """Measure what is missing, within the budget; report when all is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which to stop")
    parser.add_argument("--only", choices=("sweep", "grid", "resonance"), help="one part")
    parser.add_argument("--again", metavar="TEXT", help="measure cells whose name has this text once more")
    parser.add_argument("--report", action="store_true", help="print what is there")
    options = parser.parse_args()
    kept: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}
    if options.again:
        kept = {key: cell for key, cell in kept.items() if options.again not in key}
    wanted = [cell for cell in cells() if options.only in (None, cell.part)]
    began = time.monotonic()
    # Those that were never measured come first, those that go on come last.
    todo = deque([] if options.report else sorted(wanted, key=lambda cell: cell.key in kept))
    while todo:
        cell = todo.popleft()
        before = kept.get(cell.key)
        seconds, built_on = further(cell, before)
        if not seconds or time.monotonic() - began + seconds + 5 > options.budget:
            continue
        result = measured_again(cell, seconds, built_on)
        if not before or built_on or result["elsewhere"] < before["elsewhere"]:
            kept[cell.key] = result
        kept[cell.key]["tries"] = before["tries"] + 1 if before else 1
        todo.append(cell)
        print(
            f"{cell.key}: {result['tokens_per_s']:.1f} tokens/s, {result['ratio']:.4f} of the replay "
            f"(±{result['half_width']:.4f}), others {result['elsewhere']:.2f} cores",
            flush=True,
        )
        save(kept)
    missing = [cell.key for cell in wanted if cell.key not in kept]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} cells measured")
    report(kept)


def save(kept: dict[str, dict[str, Any]]) -> None:
    """Keep what was measured."""
    RESULTS.parent.mkdir(exist_ok=True)
    machine = platform.processor() or platform.machine()
    RESULTS.write_text(json.dumps({"simulated": True, "machine": machine, "cells": kept}, indent=1) + "\n")


def report(kept: dict[str, dict[str, Any]]) -> None:
    """Tables and the plot of what was measured, all of it simulated."""
    sweep = [cell for cell in kept.values() if cell["part"] == "sweep"]
    if sweep:
        print("\nsimulated; tokens/s: predicted = the model's T(B); estimate = T(B) x measured / replayed")
        print(" N  B          predicted  estimate  measured/replayed       interval")
    lines = []
    for n in SWEEP:
        rows = [cell for cell in sweep if cell["concurrency"] == n]
        best = max(rows, key=estimate, default=None)
        top = max(rows, key=lambda cell: cell["predicted"], default=None)
        for cell in rows:
            marks = ("  best measured" if cell is best else "") + ("  best predicted" if cell is top else "")
            print(
                f"{n:2}  {tuple(cell['thresholds'])!s:9} {cell['predicted']:9.1f} {estimate(cell):9.1f}"
                f" {cell['ratio']:18.4f} {cell['half_width']:14.2%}{marks}"
            )
        if len(rows) > 1:
            marked = next(iter(cell["thresholds"][1] for cell in rows if cell is best))
            lines.append(Line(f"N = {n}, measured", {c["thresholds"][1]: estimate(c) for c in rows}, marked))
            lines.append(Line("predicted", {c["thresholds"][1]: c["predicted"] for c in rows}, dashed=True))
    if lines:
        title = "Delayed batching on simulated models: 6.0 and 27.9 ms, p = 0.35"
        write_chart([Chart(title, "threshold of the large model", "tokens/s", lines)], PLOT, title)
    compared(kept)


def compared(kept: dict[str, dict[str, Any]]) -> None:
    """Lookahead against the best static thresholds."""
    same = ("part", "concurrency", "p", "latency_ms")
    found = [cell for cell in kept.values() if cell["part"] != "sweep"]
    pairs = [
        (static, ahead)
        for ahead in found
        for static in found
        if ahead["lookahead"] > static["lookahead"] and all(static[key] == ahead[key] for key in same)
    ]
    if not pairs:
        return
    print("\nsimulated; gains are over the best static thresholds")
    print("                             static              lookahead           gain              lookahead")
    print(" N     p  latencies          B        tokens/s   B        tokens/s   model   measured  of optimum")
    gains = []
    for static, ahead in pairs:
        model = 100 * (ahead["predicted"] / static["predicted"] - 1)
        measured = 100 * (estimate(ahead) / estimate(static) - 1)
        doubt = 100 * (ahead["half_width"] ** 2 + static["half_width"] ** 2) ** 0.5
        gains.append(measured)
        n, p, latency_ms = static["concurrency"], static["p"], tuple(static["latency_ms"])
        best = optimum(routing_model(latency_ms, p), n).tokens_per_s
        print(
            f"{n:2}  {p:4.2f}  {latency_ms[0]:g}/{latency_ms[1]:<8g}  {tuple(static['thresholds'])!s:>13}"
            f" {estimate(static):9.1f}   {tuple(ahead['thresholds'])!s:8} {estimate(ahead):8.1f}"
            f"  {model:+6.2f}%  {measured:+6.2f}% ±{doubt:.2f}   {ahead['predicted'] / best:8.4f}"
        )
    gains.sort()
    print(f"measured gain: median {gains[len(gains) // 2]:+.2f} %, {gains[0]:+.2f} to {gains[-1]:+.2f} %")


def estimate(cell: dict[str, Any]) -> float:
    """Tokens/s in the long run: the model's, times measured over replayed on the same routes."""
    return float(cell["predicted"] * cell["ratio"])


if __name__ == "__main__":
    main()
