"""Run the comparison: ``python -m bench.compare``, or a part of it; see ``--help`` and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench import shapes
from bench.compare import bound, check, load, report, work
from bench.compare.results import RESULTS, Results
from bench.compare.servers import (
    ON_SGLANG,
    ROOT,
    SYSTEMS,
    Server,
    ServerFailed,
    System,
    close_all,
    open_all,
    program,
    python_of,
    stop_all,
)

MODELS = ROOT / "build" / "bench" / "models"
LIMIT_S = 6.0
_WARM_UP_S = 1.0
_APART = 10
"""How much longer a run may take that reads long prompts: 134 M parameters read four of them in 50 s."""
_LOADING_S, _STOPPING_S = 120.0, 15.0
"""What loading all models in all servers takes at most, and stopping them; a budget leaves time for both."""


def main() -> None:
    """Parse arguments and do what they say."""
    options = _arguments()
    # Servers are stopped, too, when this program is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = Results(options.results)
    if options.report:
        report.write(results)
        return
    systems = [*SYSTEMS, *([ON_SGLANG] if options.sglang_python else [])]
    systems = [system for system in systems if options.systems.search(system.name)]
    cells = work.quick_table() if options.quick else work.full_table()
    cells = [cell for cell in cells if options.cells.search(cell.name)]
    if not systems or not (cells or options.check):
        raise SystemExit("no cell or no system matches: without --cells and --systems all are run")
    began = time.monotonic()
    results.note_machine(machine())
    complete = True
    with alone(), tempfile.TemporaryDirectory() as folder:
        try:
            if options.check:
                sample = partial(model, spread=check.SPREAD)
                check.run(systems, sample, Path(folder), options, results)
            else:
                paths = {name: model(name) for cell in cells for name in cell.models.shapes}
                complete = compare_all(cells, systems, paths, Path(folder), options, results)
                report.show(results)
        except ServerFailed as error:
            raise SystemExit(f"{error}\nwhat was measured before is in {options.results}") from None
    print(
        f"{time.monotonic() - began:.0f} s; {options.results}"
        + ("" if complete else "; there is more to do: run it again")
    )
    if complete and not options.check and planned(cells, systems, options.repetitions, results):
        raise SystemExit("some runs failed (see above): run it again")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let no other comparison of this checkout run meanwhile.

    :raises SystemExit: if one does.
    """
    MODELS.mkdir(parents=True, exist_ok=True)
    folder = os.open(MODELS, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit("another comparison is running here: each would measure the other") from None
        yield
    finally:
        os.close(folder)


class Turn(NamedTuple):
    """One run to be made."""

    cell: work.Cell
    system: System
    repetition: int


def planned(
    cells: Sequence[work.Cell], systems: Sequence[System], repetitions: int, results: Results
) -> list[list[Turn]]:
    """The runs that the results do not hold yet, grouped by the models that they need loaded.

    Within a group the whole of its cells is repeated, and within a cell the systems take turns.
    """
    groups: dict[tuple[str, ...], list[Turn]] = {}
    for repetition in range(repetitions):
        for cell in cells:
            for system in systems:
                turn = Turn(cell, system, repetition)
                if _applies(system, cell) and not results.has(cell.name, system.name, repetition):
                    groups.setdefault(_loaded(cell), []).append(turn)
    return list(groups.values())


def compare_all(
    cells: Sequence[work.Cell],
    systems: Sequence[System],
    paths: dict[str, Path],
    folder: Path,
    options: argparse.Namespace,
    results: Results,
) -> bool:
    """Make all runs that are missing; false if the budget was spent before the last."""
    began = time.monotonic()
    try:
        return all(
            compare(group, paths, folder, options, results, began + options.budget)
            for group in planned(cells, systems, options.repetitions, results)
        )
    finally:
        results.note_seconds(time.monotonic() - began)


def compare(
    turns: Sequence[Turn],
    paths: dict[str, Path],
    folder: Path,
    options: argparse.Namespace,
    results: Results,
    end: float,
) -> bool:
    """Make the runs of one group; false if the time (on the monotonic clock) was over before the last."""
    last_start = end - _last_s(options.limit)
    if time.monotonic() + _LOADING_S > last_start:
        return False
    requests: dict[work.Cell, range] = {}
    listed: list[work.Request] = []
    for cell in dict.fromkeys(turn.cell for turn in turns):
        requests[cell] = range(len(listed), len(listed) + cell.count)
        listed += work.requests(cell)
    file = folder / "work.json"
    work.save(listed, file)
    servers: dict[str, Server] = {}
    warm: set[tuple[work.Cell, System]] = set()
    try:
        for name in dict.fromkeys(turn.system.server for turn in turns):
            python = python_of(name, options.vllm_python, options.sglang_python)
            servers[name] = Server(name, python, file, folder / f"{name}.log")
        open_all(list(servers.values()), [paths[name] for name in _loaded(turns[0].cell)], "bfloat16")
        for turn in turns:
            if time.monotonic() > last_start:
                return False
            cell, system, repetition = turn
            server, indices = servers[system.server], list(requests[cell])
            try:
                if (cell, system) not in warm:
                    warm.add((cell, system))
                    ask(server, turn, indices[:1], limit_s=_WARM_UP_S, salt="")
                answers = measure(server, turn, indices, options.limit)
            except ServerFailed as error:
                if server.ended:
                    raise
                print(f"{cell.name}, {system.name}, #{repetition} failed: {error}", flush=True)
                continue
            figures = figures_of(cell, [listed[index] for index in indices], *answers)
            results.add(cell.name, system.name, repetition, figures)
            print(report.line(cell.name, system.name, repetition, figures), flush=True)
        close_all(list(servers.values()))
    finally:
        stop_all(list(servers.values()))
    return True


def ask(server: Server, turn: Turn, indices: list[int], **how: Any) -> dict[str, Any]:
    """Let a server answer requests."""
    concurrency, variant = turn.cell.concurrency, turn.system.variant
    return server.ask(do="run", requests=indices, concurrency=concurrency, variant=variant, **how)


def measure(
    server: Server, turn: Turn, indices: list[int], limit_s: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answers of a run: what all is taken from, and what decoding is."""
    salt = f"{turn.repetition} {turn.system.variant}"
    if not turn.cell.workload.apart:
        answer = ask(server, turn, indices, limit_s=limit_s, salt=salt)
        return answer, answer
    answer = ask(server, turn, indices, limit_s=_APART * limit_s, salt=salt)
    return answer, ask(server, turn, indices, limit_s=limit_s, salt=salt, twists=[1, 2])


def figures_of(
    cell: work.Cell, requests: Sequence[work.Request], answer: dict[str, Any], decoding: dict[str, Any]
) -> dict[str, Any]:
    """What is kept of a run; decode throughput is taken from ``decoding``, all else from ``answer``."""

    def measured(answer: dict[str, Any]) -> load.Figures:
        records = [load.Record(**record) for record in answer["records"]]
        return load.measure(answer["elapsed_s"], records, min(answer["at_a_time"], cell.concurrency))

    figures, decoded = measured(answer), measured(decoding)
    kept: dict[str, Any] = {
        "elapsed_s": figures.elapsed_s,
        "tokens": figures.tokens,
        "requests": len(requests),
        "finished": figures.finished,
        "end_to_end": figures.end_to_end,
        "decode": decoded.decode,
        "decode_s": decoded.decode_s,
        "ttft_s": figures.ttft_s,
        "latency_s": figures.latency_s,
        "cpu_ms_per_token": 1e3 * answer["cpu_s"] / max(figures.tokens, 1),
    }
    steps = [bound.Step(*step) for step in answer["notes"].get("steps", ())]
    if steps:
        cut = math.inf if figures.finished == len(requests) else figures.elapsed_s
        for key, whole in (("bound", False), ("steps_bound", True)):
            seconds, tokens = bound.simulate(requests, cell.concurrency, bound.StepTimes(steps, whole), cut)
            kept[key] = tokens / seconds
    return kept


def model(name: str, spread: float = shapes.SPREAD) -> Path:
    """The folder of a random model, written when first needed; vLLM keeps what it compiled by its path."""
    folder = MODELS / (name if spread == shapes.SPREAD else f"{name}-{spread}")
    if not (folder / "tokenizer_config.json").exists():
        shapes.write_model(folder, getattr(shapes, name), spread=spread)
    return folder


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": f"torch {version('torch')}, transformers {version('transformers')}",
    }


def _last_s(limit: float) -> float:
    """What the longest run takes at most, and stopping the servers after it, in seconds."""
    return 2 * _APART * limit + _STOPPING_S


def _loaded(cell: work.Cell) -> tuple[str, ...]:
    """The shapes that a cell needs loaded."""
    return cell.models.shapes[-1:] if cell.algorithm == work.ALONE else cell.models.shapes


def _applies(system: System, cell: work.Cell) -> bool:
    """Alone, the large model has no visits to be dispatched; HTTP is added to the calls of one pair."""
    if cell.algorithm == work.ALONE:
        return system.variant == "visit" and system.server != "vllm-http"
    return system.server != "vllm-http" or cell.models == work.SMALL_PAIR


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two algorithms on low effort, in some minutes")
    parser.add_argument("--check", action="store_true", help="compare outputs in float32 instead of times")
    parser.add_argument(
        "--report", action="store_true", help="only write docs/benchmarks.md's tables and plots"
    )
    for names in ("cells", "systems"):
        parser.add_argument(
            f"--{names}",
            type=_pattern,
            default="",
            metavar="REGEX",
            help=f"only {names} whose names match",
        )
    parser.add_argument("--repetitions", type=int, default=1, help="of each run: 1, more for medians")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a run is cut")
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="stop in time, with what there is; the next call goes on from there",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="kept and added to if it exists")
    parser.add_argument("--vllm-python", type=program, help="of an environment with vLLM (made if left out)")
    parser.add_argument(
        "--sglang-python", type=program, help="of one with tokenflow and SGLang, to compare it too"
    )
    options = parser.parse_args()
    if options.repetitions < 1 or not 0 < options.limit < math.inf:
        parser.error("--repetitions and --limit are at least one, and more than no time")
    least = _LOADING_S + _last_s(options.limit)
    if options.budget <= least:
        parser.error(f"in {options.budget:g} s nothing could be run: --budget must be more than {least:g} s")
    return options


if __name__ == "__main__":
    main()
