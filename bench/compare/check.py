"""Whether all systems do the same work: equal traces must give equal outputs, in float32."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.compare import traces, work
from bench.compare.results import Results
from bench.compare.servers import Server, System, open_all, python_of

REQUESTS = 4
WORKLOAD = work.Workload("check", 100, 64, 1)


def run(
    systems: Sequence[System],
    paths: dict[str, Path],
    folder: Path,
    options: argparse.Namespace,
    results: Results,
) -> None:
    """Answer a few requests of every algorithm with every system, two at a time, and compare the tokens.

    :raises SystemExit: if outputs differ.
    """
    outputs: dict[str, dict[str, list[int]]] = {}
    for models in (work.SMALL_PAIR, work.TRIO):
        algorithms = [name for name in traces.ALGORITHMS if (name == "me") == (models is work.TRIO)]
        cells = [work.Cell(name, models, WORKLOAD, REQUESTS) for name in algorithms]
        listed = [request for cell in cells for request in work.requests(cell)]
        work.save(listed, folder / "work.json")
        for system in systems:
            if system.server == "vllm-http" and models is work.TRIO:
                continue  # the same engines as without HTTP
            python = python_of(system.server, options.vllm_python, options.sglang_python)
            server = Server(system.server, python, folder / "work.json", folder / f"{system.server}.log")
            try:
                open_all([server], [paths[name] for name in models.shapes], "float32")
                for number, cell in enumerate(cells):
                    answer = server.ask(
                        do="run",
                        requests=list(range(number * REQUESTS, (number + 1) * REQUESTS)),
                        concurrency=2,
                        limit_s=options.limit,
                        salt="",
                        variant=system.variant,
                    )
                    for record in answer["records"]:
                        key = f"{cell.algorithm}, request {record['request'] % REQUESTS}"
                        outputs.setdefault(key, {})[system.name] = record["tokens"]
                server.ask(do="close")
            finally:
                server.stop()
    different = [key for key, by_system in outputs.items() if len({*map(tuple, by_system.values())}) > 1]
    tokens = sum(len(next(iter(by_system.values()))) for by_system in outputs.values())
    results.note_check(
        {
            "systems": [system.name for system in systems],
            "requests": len(outputs),
            "tokens": tokens,
            "different": different,
        }
    )
    print(f"{len(outputs)} requests, {tokens} tokens, {len(systems)} systems: {len(different)} differ")
    for key in different:
        print(key, outputs[key])
    if different:
        raise SystemExit(1)
