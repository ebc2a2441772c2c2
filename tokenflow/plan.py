"""``tokenflow plan``: the best batch thresholds of a recipe, and how fast it should run with them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenflow.chart import Chart, Line, as_text, check_target, write_chart
from tokenflow.dsl.assume import assumed_model
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.errors import InvalidRequest, RecipeError, TokenflowError
from tokenflow.planner import Lookahead, RoutingModel
from tokenflow.planner.contest import Progress
from tokenflow.planner.model import LatencyTable, Throughput
from tokenflow.planner.search import PolicyPlan, best_policy


def plan(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    try:
        if args.plot is not None:
            check_target(Path(args.plot))
        if args.input is not None and not args.measure:
            raise ValueError("--input gives the prompts of --measure: say --measure, too")
        recipe = load_recipe(args.recipe, args.overrides)
        if args.measure:
            from tokenflow.calibrate import measure

            model = measure(recipe, max(args.concurrency), args.seconds, args.input)
        else:
            model = assumed_model(recipe)
        report = Report(recipe, model, args.measure, [_search(model, n) for n in args.concurrency])
    except RecipeError:
        raise
    except (ValueError, InvalidRequest) as error:
        print(f"tokenflow plan: {error}", file=sys.stderr)
        return 2
    except TokenflowError as error:
        print(f"tokenflow: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report.as_data(), indent=2) if args.json else "\n".join(report.as_lines()))
    if args.plot is not None:
        title = f"{recipe.name}: planned throughput{report.simulated}"
        write_chart([report.chart(index) for index in report.drawn()], Path(args.plot), title)
        print(f"{args.plot}: written", file=sys.stderr)
    return 0


def _search(model: RoutingModel, concurrency: int) -> PolicyPlan:
    with _progress(concurrency) as progress:
        return best_policy(model, concurrency, progress=progress)


@contextmanager
def _progress(concurrency: int) -> Iterator[Progress]:
    """A bar on a terminal, for searches that take long enough to be seen."""
    from tqdm import tqdm

    hidden = not sys.stderr.isatty()
    with tqdm(
        desc=f"N = {concurrency}", unit="candidate", file=sys.stderr, disable=hidden, leave=False, delay=0.5
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        yield show


@dataclass(frozen=True)
class Report:
    """What was planned, for people and for programs."""

    recipe: RecipeIR
    model: RoutingModel
    measured: bool
    plans: Sequence[PolicyPlan]

    @property
    def names(self) -> tuple[str, ...]:
        """The models of the plans, in their order."""
        return self.recipe.reachable()

    @property
    def simulated(self) -> str:
        """A remark where models are simulated."""
        return " (simulated)" if self.recipe.simulated else ""

    def as_lines(self) -> list[str]:
        """For people."""
        how = "measured" if self.measured else "as the recipe says"
        lines = [f"{self.recipe.name}{self.simulated}, {how}:"]
        width = max(map(len, self.names))
        lines += [f"  {name:{width}}  {self._model_text(i)}" for i, name in enumerate(self.names)]
        lines += ["", *self._table()]
        for index in self.drawn():
            lines += ["", *self._drawing(index)]
        if self.measured:
            lines += ["", *self._snippet()]
        return lines

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        return {
            "recipe": self.recipe.name,
            "simulated": bool(self.recipe.simulated),
            "measured": self.measured,
            "models": [
                {
                    "name": name,
                    "latency_ms": dict(self._latency(i)),
                    "routing": dict(zip(self.names, self.model.routing[i], strict=True)),
                    "commits": dict(zip(self.names, self.model.commits[i], strict=True)),
                }
                for i, name in enumerate(self.names)
            ],
            "plans": [self._plan_data(plan) for plan in self.plans],
        }

    def drawn(self) -> list[int]:
        """The models whose thresholds are worth a drawing: the slowest one, and those that should wait."""
        slowest = max(range(self.model.size), key=lambda i: self.model.step_ms(i, 1))
        return [
            i
            for i in range(self.model.size)
            if i == slowest or any(plan.static.thresholds[i] > 1 for plan in self.plans)
        ]

    def chart(self, index: int) -> Chart:
        """Throughput against the threshold of one model, a line for each concurrency."""
        lines = [
            Line(f"N = {plan.static.concurrency}", _by_threshold(plan, index), plan.static.thresholds[index])
            for plan in self.plans
        ]
        name = self.names[index]
        title = f"{self.recipe.name}: throughput by the threshold of {name}{self.simulated}"
        return Chart(title, f"threshold of {name}, the others at their best", "tokens/s", lines)

    def _model_text(self, i: int) -> str:
        steps = ", ".join(
            f"{latency:.4g} ms" + (f" at batch {batch}" if len(self._latency(i)) > 1 else "")
            for batch, latency in self._latency(i)
        )
        shares = (
            f"{100 * share:.3g}% {'stay' if to == i else f'to {self.names[to]}'}"
            for to, share in enumerate(self.model.routing[i])
            if share
        )
        return f"a step takes {steps}; {', '.join(shares)}"

    def _table(self) -> list[str]:
        rows = [("N", "policy", "start a batch with", "tokens/s", "over eager", "found")]
        for plan in self.plans:
            static, n = plan.static, str(plan.static.concurrency)
            rows.append(
                (n, "eager", self._batch_text((1,) * self.model.size), *_figures(static.eager, static.eager))
            )
            rows.append(
                (
                    n,
                    "thresholds",
                    self._batch_text(static.thresholds),
                    *_figures(static.throughput, static.eager),
                )
            )
            rows.append(
                (
                    n,
                    "lookahead",
                    self._batch_text(plan.lookahead.thresholds),
                    *_figures(plan.lookahead_throughput, static.eager),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        best = {plan.static.concurrency: _winner(plan) for plan in self.plans}
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if column in (0, 3, 4) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            star = " ★" if row[0].isdigit() and best[int(row[0])] == row[1] else ""
            lines.append(("  ".join(cells) + star).rstrip())
        return lines

    def _drawing(self, index: int) -> list[str]:
        lines = []
        for plan in self.plans:
            points = _by_threshold(plan, index)
            if len(points) > 1:
                title = f"N = {plan.static.concurrency}: tokens/s by the threshold of {self.names[index]}"
                lines += [title, *as_text(Line("", points, plan.static.thresholds[index]))]
        return lines

    def _snippet(self) -> list[str]:
        """What was measured, as a recipe says it."""
        latency = {name: dict(self._latency(i)) for i, name in enumerate(self.names)}
        rounded = {
            name: {b: round(ms, 3) for b, ms in table.items()} if len(table) > 1 else round(table[1], 3)
            for name, table in latency.items()
        }
        lines = ["batching:", "  policy: planned", "  assume:", f"    latency_ms: {_inline(rounded)}"]
        for key, matrix in (("routing", self.model.routing), ("commits", self.model.commits)):
            rows = {
                name: {
                    to: round(matrix[i][j], 4)
                    for j, to in enumerate(self.names)
                    if self.model.routing[i][j] and (key == "commits" or j != i)
                }
                for i, name in enumerate(self.names)
            }
            lines.append(f"    {key}: {_inline(rows)}")
        return lines

    def _batch_text(self, thresholds: Sequence[int]) -> str:
        return ", ".join(f"{name} {b}" for name, b in zip(self.names, thresholds, strict=True))

    def _latency(self, i: int) -> list[tuple[int, float]]:
        table = self.model.latency_ms[i]
        assert isinstance(table, LatencyTable)
        return list(zip(table.sizes, table.values_ms, strict=True))

    def _plan_data(self, plan: PolicyPlan) -> dict[str, Any]:
        static = plan.static

        def named(thresholds: Sequence[int]) -> dict[str, int]:
            return dict(zip(self.names, thresholds, strict=True))

        return {
            "concurrency": static.concurrency,
            "policy": _winner(plan),
            "thresholds": named(static.thresholds),
            **_rate_data(static.throughput),
            "gain_over_eager": static.gain,
            "ties": [named(b) for b in static.ties],
            "eager": _rate_data(static.eager),
            "lookahead": {
                "thresholds": named(plan.lookahead.thresholds),
                **_rate_data(plan.lookahead_throughput),
            },
            "table": [{"thresholds": named(b), **_rate_data(rate)} for b, rate in static.table],
        }


def _winner(plan: PolicyPlan) -> str:
    return "lookahead" if isinstance(plan.policy, Lookahead) else "thresholds"


def _rate_data(rate: Throughput) -> dict[str, Any]:
    return {"tokens_per_s": rate.tokens_per_s, "half_width": rate.half_width, "method": rate.method}


def _figures(rate: Throughput, eager: Throughput) -> tuple[str, str, str]:
    gain = rate.tokens_per_s / eager.tokens_per_s - 1 if eager.tokens_per_s else 0.0
    found = f"by simulation, ±{rate.half_width:.1f}" if rate.method == "simulated" else "exactly"
    return f"{rate.tokens_per_s:.1f}", "" if rate is eager else f"{gain:+.1%}", found


def _by_threshold(plan: PolicyPlan, index: int) -> dict[int, float]:
    """The best throughput for each threshold of one model, whatever those of the others."""
    best: dict[int, float] = {}
    for thresholds, rate in plan.static.table:
        b = thresholds[index]
        best[b] = max(best.get(b, 0.0), rate.tokens_per_s)
    return dict(sorted(best.items()))


def _inline(value: Any) -> str:
    """A mapping as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(inner)}" for key, inner in value.items()) + "}"
    return f"{value:g}"
