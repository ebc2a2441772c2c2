"""Tables and the plot, made from the results alone."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bench.compare import beside, plot, traces, work
from bench.compare.beside import table
from bench.compare.results import Results
from bench.compare.servers import ON_SGLANG, ROOT, SYSTEMS

PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
PLOT = ROOT / "docs" / "benchmarks.svg"
OURS = SYSTEMS[0].name
SHORT = {
    "tokenflow": "tokenflow",
    "transformers loop": "loop",
    "vLLM, a request per visit": "vLLM, per visit",
    "vLLM, a request per token": "vLLM, per token",
    "vLLM over HTTP, a request per visit": "vLLM, HTTP",
    "tokenflow on SGLang": "tokenflow on SGLang",
}
FORETOLD = tuple(
    system.name for system in SYSTEMS if system.server != "tokenflow" and "per visit" in system.name
)
"""Systems that are told beforehand where each visit ends, which no rule could tell them."""
Runs = Sequence[dict[str, Any]]


def line(cell: str, system: str, repetition: int, run: dict[str, Any]) -> str:
    """One run, as it is shown while the comparison goes on."""
    cut = "" if run["finished"] == run["requests"] else f"  ({run['finished']}/{run['requests']} finished)"
    bound = f"  {run['end_to_end'] / run['bound']:.1%} of the bound" if "bound" in run else ""
    return (
        f"{cell:32} {system:36} #{repetition}  decode {run['decode']:7.1f} tok/s ({run['decode_s']:.1f} s)"
        f"  end to end {run['end_to_end']:7.1f}  cpu {run['cpu_ms_per_token']:6.2f} ms/token"
        f"  {run['elapsed_s']:5.1f} s{bound}{cut}"
    )


def median(runs: Runs, key: str) -> float:
    """Median over repetitions; of a list, of all its items."""
    return statistics.median(
        value for run in runs for value in (run[key] if isinstance(run[key], list) else [run[key]])
    )


class Row:
    """The runs of one cell, by system, in the order of the table."""

    def __init__(self, cell: work.Cell, results: Results) -> None:
        self.cell = cell
        self.runs: dict[str, Runs] = {
            system.name: runs
            for system in (*SYSTEMS, ON_SGLANG)
            if (runs := results.of(cell.name, system.name))
        }

    @property
    def load(self) -> str:
        """The largest model, the workload and how many requests are in flight."""
        largest = self.cell.models.name.partition("+")[0]
        return f"{largest}, {self.cell.workload.name}, {self.cell.concurrency} at a time"

    def over_strongest(self, key: str, without: Collection[str] = ()) -> float:
        """tokenflow's median over that of the strongest other system that is not ``without``.

        Where one model writes alone there are no visits to foretell, and all count.
        """
        without = () if self.cell.algorithm == work.ALONE else without
        others = [
            median(runs, key)
            for name, runs in self.runs.items()
            if not name.startswith(OURS) and name not in without
        ]
        return median(self.runs[OURS], key) / max(others) if others and OURS in self.runs else math.nan

    @property
    def bound(self) -> float:
        """Tokens per second end to end if nothing but tokenflow's forward passes took time."""
        bounds = [run["bound"] for run in self.runs.get(OURS, ()) if "bound" in run]
        return statistics.median(bounds) if bounds else math.nan

    def of_bound(self, key: str) -> float:
        """How much tokenflow reaches end to end of what the steps of the same run allow.

        :param key: ``bound`` counts their forward passes alone, ``steps_bound`` whole steps.
        """
        shares = [run["end_to_end"] / run[key] for run in self.runs.get(OURS, ()) if key in run]
        return statistics.median(shares) if shares else math.nan


def figure(value: float) -> str:
    """Three significant digits, with a separator of thousands."""
    if math.isnan(value):
        return ""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def spread(runs: Runs, key: str) -> str:
    """Median, and half the range in percent of it."""
    values = [run[key] for run in runs]
    middle = statistics.median(values)
    if len(values) == 1:
        return figure(middle)
    half = (max(values) - min(values)) / 2 / middle if middle else 0.0
    return f"{figure(middle)} ± {half:.0%}".replace("%", " %")


def systems_of(rows: Sequence[Row]) -> list[str]:
    """Systems that some row has, in order."""
    return [name for name in SHORT if any(name in row.runs for row in rows)]


def throughput(rows: Sequence[Row], by_load: bool = False) -> str:
    """Decode throughput of every system, and what tokenflow gains.

    :param by_load: rows are called by model, workload and concurrency, not by algorithm.
    """
    if not rows:
        return ""
    names = systems_of(rows)
    heads = ["model and load" if by_load else "algorithm", *(SHORT[name] for name in names)]
    heads += ["gain", "gain over all", "end to end", "gain", "gain over all", "of the bound", "of steps"]
    return table(
        heads,
        (
            [
                row.load if by_load else row.cell.algorithm,
                *(spread(row.runs[name], "decode") if name in row.runs else "" for name in names),
                *(f"**{gain}**" if gain else "" for gain in gains(row, "decode")),
                spread(row.runs[OURS], "end_to_end"),
                *gains(row, "end_to_end"),
                share(row.of_bound("bound")),
                share(row.of_bound("steps_bound")),
            ]
            for row in rows
        ),
    )


def gains(row: Row, key: str) -> tuple[str, str]:
    """What tokenflow gains over the strongest system that a rule could use, and over the strongest of all."""
    found = row.over_strongest(key, without=FORETOLD), row.over_strongest(key)
    first, second = ("" if math.isnan(gain) else f"{gain:.2f}" for gain in found)
    return first, second


def share(value: float) -> str:
    """In percent."""
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def per_request(rows: Sequence[Row], key: str, scale: float) -> str:
    """A median over requests or runs, of every system."""
    names = systems_of(rows)
    head = ["workload", "algorithm", *(SHORT[name] for name in names)]
    return table(
        head,
        (
            [
                row.cell.workload.name,
                row.cell.algorithm,
                *(
                    figure(scale * median(row.runs[name], key))
                    if name in row.runs and any(run[key] for run in row.runs[name])
                    else ""
                    for name in names
                ),
            ]
            for row in rows
        ),
    )


def effort(rows: Sequence[Row]) -> str:
    """What is left on high effort of the end-to-end throughput on low effort, and of tokenflow's bound."""
    by_name = {(row.cell.algorithm, row.cell.workload.name): row for row in rows}
    names = systems_of(rows)
    lines = []
    for algorithm in traces.ALGORITHMS:
        low, high = by_name.get((algorithm, "low")), by_name.get((algorithm, "high"))
        if low is None or high is None:
            continue
        kept = [
            share(median(high.runs[name], key) / median(low.runs[name], key))
            if name in low.runs and name in high.runs
            else ""
            for key in ("end_to_end", "decode")
            for name in (names if key == "end_to_end" else names[:1])
        ]
        lines.append([algorithm, *kept, share(high.bound / low.bound)])
    columns = [*(SHORT[name] for name in names), "tokenflow, decode", "tokenflow, bound"]
    return table(["algorithm", *columns], lines)


def summary(rows: Sequence[Row]) -> str:
    """The least, the geometric mean and the most of what tokenflow gains, per workload."""
    lines = []
    for workload in work.WORKLOADS:
        here = [row for row in rows if row.cell.workload == workload and len(row.runs) > 1]
        if not here:
            continue
        cells = [f"{workload.name} ({workload.prompt} in, {workload.output} out)"]
        cells += [
            span([row.over_strongest(key, without) for row in here])
            for without in (FORETOLD, ())
            for key in ("decode", "end_to_end")
        ]
        lines.append(cells)
    return table(
        ["workload", "decode", "end to end", "decode, over all", "end to end, over all"],
        lines,
    )


def span(values: Sequence[float]) -> str:
    """Least, most, and geometric mean of those that are known; nothing if none is."""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return ""
    return f"{min(values):.2f} to {max(values):.2f}, mean {statistics.geometric_mean(values):.2f}"


def blocks(results: Results) -> dict[str, str]:
    """Every table by name."""
    rows = [row for cell in work.full_table() if OURS in (row := Row(cell, results)).runs]
    routed = [row for row in rows if row.cell.algorithm != work.ALONE]
    small = [row for row in routed if row.cell.models != work.LARGE_PAIR]
    four = [row for row in small if row.cell.concurrency == 4]
    made: dict[str, str] = {
        f"decode {workload.name}": throughput([row for row in four if row.cell.workload == workload])
        for workload in work.WORKLOADS
    }
    others = [row for row in small if row.cell.concurrency != 4]
    made["summary"] = summary(four)
    made["larger"] = throughput([row for row in routed if row.cell.models == work.LARGE_PAIR])
    for concurrency in (1, 16):
        made[f"concurrency {concurrency}"] = throughput(
            [row for row in others if row.cell.concurrency == concurrency]
        )
    made["alone"] = throughput([row for row in rows if row.cell.algorithm == work.ALONE], by_load=True)
    made["ttft"] = per_request(four, "ttft_s", 1e3)
    made["latency"] = per_request(four, "latency_s", 1.0)
    made["cpu"] = per_request(four, "cpu_ms_per_token", 1.0)
    made["effort"] = effort(four)
    made["machine"] = measured_on(results)
    made["check"] = checked(results)
    made["ablation"] = beside.ablation()
    made["step"] = beside.step()
    return made


def measured_on(results: Results) -> str:
    """A line about the machine and the time that all runs took."""
    if not results.machine:
        return ""
    machine, minutes = results.machine, results.seconds / 60
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {machine['versions']}; "
        f"all runs together took {minutes:.0f} minutes, loading included.\n"
    )


def checked(results: Results) -> str:
    """What the comparison of outputs found, in a sentence for each set of models."""
    lines = []
    for models, found in results.check.items():
        differing = len(found["different"])
        verdict = f"{differing} outputs differ" if differing else "all outputs are equal"
        requests, tokens, systems = found["requests"], found["tokens"], len(found["systems"])
        lines.append(f"{models}: {requests} requests, {tokens} tokens, {systems} systems: {verdict}.")
    return "  \n".join(lines) + "\n" if lines else ""


def fill(text: str, made: dict[str, str]) -> str:
    """Put tables between their marks, ``<!-- NAME -->`` and ``<!-- end -->``."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n\n{made.get(match[1], '')}\n<!-- end -->"

    return re.sub(r"<!-- (?!end)([a-z0-9 ]+) -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


def show(results: Results) -> None:
    """Print the tables."""
    for name, text in blocks(results).items():
        if text.count("\n") > 2:
            print(f"\n{name}\n{text}", end="")


def write(results: Results, pages: Sequence[Path] = PAGES, picture: Path = PLOT) -> None:
    """Fill in the pages and draw the plot.

    :raises SystemExit: if there is nothing to fill in.
    """
    made = blocks(results)
    rows = [Row(cell, results) for cell in work.full_table() if cell.concurrency == 4]
    rows = [row for row in rows if OURS in row.runs and row.cell.models != work.LARGE_PAIR]
    if not rows:
        raise SystemExit("no results that tables could be made of: the pages stay as they are")
    for page in pages:
        page.write_text(fill(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    names = systems_of(rows)
    groups = [
        (
            f"{workload.name} effort: {workload.prompt} in, {workload.output} out",
            [
                (row.cell.algorithm, [median(row.runs[name], "decode") for name in names])
                for row in rows
                if row.cell.workload == workload and set(names) <= set(row.runs)
            ],
        )
        for workload in work.WORKLOADS
    ]
    picture.write_text(plot.bars(groups, [SHORT[name] for name in names], "decode tokens/s"))
