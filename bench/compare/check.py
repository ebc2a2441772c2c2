"""Whether all systems do the same work: equal traces must give equal outputs, in float32."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from bench.compare import traces, work
from bench.compare.results import Results
from bench.compare.servers import Server, System, open_all, python_of, stop_all

SPREAD = 0.1
"""Of the layers' weights: with less, models repeat the last token whatever came before, and all outputs would
be equal though a system had lost what it read."""
REQUESTS = 4
WORKLOAD = work.Workload("check", 100, 64, 1)
Outputs = dict[str, dict[str, list[int]]]
"""Tokens by request and system."""


def run(
    systems: Sequence[System],
    model: Callable[[str], Path],
    folder: Path,
    options: argparse.Namespace,
    results: Results,
) -> None:
    """Answer a few requests of every algorithm with every system, two at a time, and compare the tokens.

    :param model: the folder of a shape's model.
    :raises SystemExit: if outputs differ, or there is nothing to compare.
    """
    if len(systems) < 2:
        raise SystemExit("one system has nothing to be compared with: --systems must match more")
    different, compared = [], 0
    for models in (work.SMALL_PAIR, work.TRIO):
        algorithms = [name for name in traces.ALGORITHMS if (name == "me") == (models is work.TRIO)]
        cells = [work.Cell(name, models, WORKLOAD, REQUESTS) for name in algorithms]
        cells = [cell for cell in cells if options.cells.search(cell.name)]
        if not cells:
            continue
        work.save([request for cell in cells for request in work.requests(cell)], folder / "work.json")
        outputs: Outputs = {}
        for name, group in groupby(systems, key=lambda system: system.server):
            if name == "vllm-http" and models is work.TRIO:
                continue  # the same engines as without HTTP
            python = python_of(name, options.vllm_python, options.sglang_python)
            server = Server(name, python, folder / "work.json", folder / f"{name}.log")
            try:
                open_all([server], [model(shape) for shape in models.shapes], "float32")
                for system in group:
                    _answer(server, system, cells, outputs)
                server.ask(do="close")
            finally:
                stop_all([server])
        different += _compare(outputs, models, systems, results)
        compared += len(outputs)
    if not compared:
        raise SystemExit("no sample matches: they are called like r2r 29M+0.1M check x4")
    if different:
        raise SystemExit(1)


def _answer(server: Server, system: System, cells: Sequence[work.Cell], outputs: Outputs) -> None:
    """Let a system answer the requests of all cells."""
    for number, cell in enumerate(cells):
        answer = server.ask(
            do="run",
            requests=list(range(number * REQUESTS, (number + 1) * REQUESTS)),
            concurrency=2,
            limit_s=120.0,
            salt="check",
            variant=system.variant,
        )
        for record in answer["records"]:
            key = f"{cell.algorithm}, request {record['request'] % REQUESTS}"
            outputs.setdefault(key, {})[system.name] = record["tokens"]


def _compare(outputs: Outputs, models: work.Models, systems: Sequence[System], results: Results) -> list[str]:
    """Which requests have different outputs, or a part of one; all is kept in the results."""
    different = [
        key
        for key, by_system in outputs.items()
        if len({*map(tuple, by_system.values())}) > 1
        or any(len(ids) != WORKLOAD.output for ids in by_system.values())
    ]
    tokens = sum(len(next(iter(by_system.values()))) for by_system in outputs.values())
    names = [system.name for system in systems if any(system.name in found for found in outputs.values())]
    found = {"systems": names, "requests": len(outputs), "tokens": tokens, "different": different}
    results.note_check(models.name, found)
    print(f"{models.name}: {len(outputs)} requests, {tokens} tokens, {len(names)} systems")
    for key in different:
        print(f"{key} differs:", *(f"  {name}: {ids}" for name, ids in outputs[key].items()), sep="\n")
    return different
