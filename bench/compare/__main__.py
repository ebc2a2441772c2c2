"""Run the comparison: ``python -m bench.compare``, or a part of it; see ``--help`` and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench import shapes
from bench.compare import bound, check, load, report, work
from bench.compare.results import RESULTS, Results
from bench.compare.servers import (
    ON_SGLANG,
    ROOT,
    SYSTEMS,
    Server,
    System,
    close_all,
    open_all,
    python_of,
)

MODELS = ROOT / "build" / "bench" / "models"
LIMIT_S = 60.0


def main() -> None:
    """Parse arguments and do what they say."""
    options = _arguments()
    if options.report:
        report.write(Results(options.results))
        return
    systems = [*SYSTEMS, *([ON_SGLANG] if options.sglang_python else [])]
    systems = [system for system in systems if re.search(options.systems, system.name)]
    cells = work.quick_table() if options.quick else work.full_table()
    cells = [cell for cell in cells if re.search(options.cells, cell.name)]
    began = time.monotonic()
    results = Results(options.results)
    results.note_machine(machine())
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: model(name) for cell in cells for name in cell.models.shapes}
        if options.check:
            check.run(systems, paths, Path(folder), options, results)
        else:
            for repetition in range(options.repetitions):
                compare(cells, systems, repetition, paths, Path(folder), options, results)
    print(f"{time.monotonic() - began:.0f} s; {options.results}")
    if not options.check:
        report.show(results)


def compare(
    cells: Sequence[work.Cell],
    systems: Sequence[System],
    repetition: int,
    paths: dict[str, Path],
    folder: Path,
    options: argparse.Namespace,
    results: Results,
) -> None:
    """One repetition of every cell by every system; what the results hold already is left out."""
    todo = [
        (cell, system)
        for cell in cells
        for system in systems
        if _applies(system, cell) and not results.has(cell.name, system.name, repetition)
    ]
    for models, group in groupby(todo, key=lambda item: _loaded(item[0])):
        planned = list(group)
        requests: dict[work.Cell, range] = {}
        listed: list[work.Request] = []
        for cell in dict.fromkeys(cell for cell, _ in planned):
            requests[cell] = range(len(listed), len(listed) + cell.count)
            listed += work.requests(cell)
        file = folder / "work.json"
        work.save(listed, file)
        names = list(dict.fromkeys(system.server for _, system in planned))
        servers = {
            name: Server(
                name,
                python_of(name, options.vllm_python, options.sglang_python),
                file,
                folder / f"{name}.log",
            )
            for name in names
        }
        try:
            open_all(list(servers.values()), [paths[name] for name in models], "bfloat16")
            for cell, system in planned:
                server = servers[system.server]
                first = requests[cell].start
                run = {"do": "run", "concurrency": cell.concurrency, "variant": system.variant}
                server.ask(**run, requests=[first], limit_s=3.0, salt=-1)
                answer = server.ask(
                    **run, requests=list(requests[cell]), limit_s=options.limit, salt=repetition
                )
                figures = figures_of(cell, listed[first : requests[cell].stop], answer)
                results.add(cell.name, system.name, repetition, figures)
                print(report.line(cell.name, system.name, repetition, figures), flush=True)
            close_all(list(servers.values()))
        finally:
            for server in servers.values():
                server.stop()


def figures_of(cell: work.Cell, requests: Sequence[work.Request], answer: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    records = [load.Record(**record) for record in answer["records"]]
    at_a_time = min(answer["at_a_time"], cell.concurrency)
    figures = load.measure(answer["elapsed_s"], records, at_a_time)
    kept: dict[str, Any] = {
        "elapsed_s": figures.elapsed_s,
        "tokens": figures.tokens,
        "requests": len(requests),
        "finished": figures.finished,
        "end_to_end": figures.end_to_end,
        "decode": figures.decode,
        "decode_s": figures.decode_s,
        "ttft_s": figures.ttft_s,
        "latency_s": figures.latency_s,
        "cpu_ms_per_token": 1e3 * answer["cpu_s"] / max(figures.tokens, 1),
    }
    steps = [bound.Step(*step) for step in answer["notes"].get("steps", ())]
    if steps and figures.finished == len(requests):
        kept["bound_s"] = bound.simulate(requests, cell.concurrency, bound.StepTimes(steps))
    return kept


def model(name: str) -> Path:
    """The folder of a random model, written when first needed; vLLM keeps what it compiled by its path."""
    folder = MODELS / name
    if not (folder / "tokenizer_config.json").exists():
        shapes.write_model(folder, getattr(shapes, name))
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
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def _loaded(cell: work.Cell) -> tuple[str, ...]:
    """The shapes that a cell needs loaded."""
    return cell.models.shapes[-1:] if cell.algorithm == work.ALONE else cell.models.shapes


def _applies(system: System, cell: work.Cell) -> bool:
    """Alone, the large model has no visits to be dispatched."""
    return cell.algorithm != work.ALONE or (system.variant == "visit" and system.server != "vllm-http")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two algorithms on low effort, in some minutes")
    parser.add_argument("--check", action="store_true", help="compare outputs in float32 instead of times")
    parser.add_argument(
        "--report", action="store_true", help="only write docs/benchmarks.md's tables and plots"
    )
    parser.add_argument("--cells", default="", metavar="REGEX", help="only cells whose names match")
    parser.add_argument("--systems", default="", metavar="REGEX", help="only systems whose names match")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a run is cut")
    parser.add_argument("--results", type=Path, default=RESULTS, help="kept and added to if it exists")
    parser.add_argument("--vllm-python", type=Path, help="of an environment with vLLM (made if left out)")
    parser.add_argument(
        "--sglang-python", type=Path, help="of one with tokenflow and SGLang, to compare it too"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
