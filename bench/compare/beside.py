"""Tables of what other benches have measured, from their results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.compare.results import RESULTS

ABLATION, STEP = RESULTS.with_name("ablation.json"), RESULTS.with_name("step.json")
_ENGINES = {
    "engine": "tokenflow",
    "bare": "bare forward",
    "vllm_eager": "vLLM, eager",
    "vllm_eager_pages": "vLLM, eager, huge pages",
    "vllm_compiled": "vLLM, compiled",
    "transformers": "transformers",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def ablation(path: Path = ABLATION) -> str:
    """Decode throughput of ``bench.ablation``'s lines, and what is left of the full one."""
    if not path.exists():
        return ""
    lines: dict[str, dict[str, list[dict[str, float]]]] = json.loads(path.read_text())["lines"]
    full = next(iter(lines.values()))

    def cell(line: str, concurrency: str) -> str:
        here, whole = (
            statistics.median(run["decode"] for run in runs[concurrency]) for runs in (lines[line], full)
        )
        return f"{here:,.0f} ({100 * here / whole:.0f} %)"

    return table(
        ["", *(f"N = {concurrency}" for concurrency in full)],
        ([line, *(cell(line, concurrency) for concurrency in full)] for line in lines),
    )


def step(path: Path = STEP) -> str:
    """Medians of ``bench.step``, and how the torch engine compares to each."""
    if not path.exists():
        return ""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["batches"]
    shown = [name for name in _ENGINES if f"{name}_median_ms" in rows[0]]

    def cell(row: dict[str, Any], name: str) -> str:
        ratio = row.get(f"engine_over_{name}_median")
        return f"{row[f'{name}_median_ms']:.2f}" + ("" if ratio is None else f" ({ratio:.2f})")

    return table(
        ["batch", *(_ENGINES[name] for name in shown)],
        ([str(row["batch"]), *(cell(row, name) for name in shown)] for row in rows),
    )
