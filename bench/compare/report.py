"""Tables and plots from the results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.compare import work
from bench.compare.results import Results
from bench.compare.servers import ON_SGLANG, SYSTEMS


def line(cell: str, system: str, repetition: int, run: dict[str, Any]) -> str:
    """One run, as it is shown while the comparison goes on."""
    cut = "" if run["finished"] == run["requests"] else f"  ({run['finished']}/{run['requests']} finished)"
    bound = f"  {run['bound_s'] / run['elapsed_s']:.1%} of the bound" if "bound_s" in run else ""
    return (
        f"{cell:32} {system:36} #{repetition}  decode {run['decode']:7.1f} tok/s ({run['decode_s']:.1f} s)"
        f"  end to end {run['end_to_end']:7.1f}  cpu {run['cpu_ms_per_token']:6.2f} ms/token"
        f"  {run['elapsed_s']:5.1f} s{bound}{cut}"
    )


def median(runs: Sequence[dict[str, Any]], key: str) -> float:
    """Median over repetitions."""
    return statistics.median(run[key] for run in runs)


def show(results: Results) -> None:
    """Medians by cell and system, with the ratio to the strongest other system."""
    for cell in work.full_table():
        rows = {
            system.name: runs
            for system in (*SYSTEMS, ON_SGLANG)
            if (runs := results.of(cell.name, system.name))
        }
        if not rows:
            continue
        print(cell.name)
        for name, runs in rows.items():
            others = [
                median(other, "decode") for key, other in rows.items() if not key.startswith("tokenflow")
            ]
            ratio = f"{median(runs, 'decode') / max(others):6.2f} x" if others else ""
            print(f"  {name:36} {median(runs, 'decode'):8.1f} {median(runs, 'end_to_end'):8.1f} {ratio}")


def write(results: Results) -> None:
    """Fill in docs/benchmarks.md."""
    raise NotImplementedError
