"""Routes of single requests: which model runs each decode step, and how many tokens that step commits."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tokenflow.errors import PlanError
from tokenflow.planner.model import RoutingModel

RunLengths = Sequence[Mapping[int, float] | None]
"""For each model, the number of consecutive steps before a request leaves it: weights by number, or ``None``
where the routing probabilities say it (a geometric number).  A ``Counter`` of measured runs will do."""


class Visit(NamedTuple):
    """One decode step of one request."""

    model: int
    commits: float


Route = Sequence[Visit] | Sequence[tuple[int, float]]
"""All visits of one request, in order."""


def draw_route(
    model: RoutingModel, source: random.Random, run_lengths: RunLengths | None = None
) -> Iterator[Visit]:
    """An endless random route.

    With a run-length distribution the staying probability of that model is not used: a run is drawn when the
    request arrives, and when it is over the other entries of the model's row say where the request goes.

    :raises PlanError: for run lengths that do not fit the model.
    """
    draws = [_Row(model, i, lengths) for i, lengths in enumerate(run_lengths or (None,) * model.size)]
    if len(draws) != model.size:
        raise PlanError(f"run_lengths must list {model.size} distributions, one per model, got {len(draws)}")
    return _walk(model, draws, source.random)


def check_route(model: RoutingModel, number: int, route: Route) -> list[Visit]:
    """A recorded route as a list of visits.

    :raises PlanError: where it is empty, names a model that does not exist or commits a negative number.
    """
    visits = [Visit(*visit) for visit in route]
    if not visits:
        raise PlanError(f"route {number} is empty; a request makes at least one step")
    for at, (where, commits) in enumerate(visits):
        if where not in range(model.size):
            raise PlanError(
                f"route {number}, visit {at}: there is no model {where!r} (models are 0 to {model.size - 1})"
            )
        if not (math.isfinite(commits) and commits >= 0):
            raise PlanError(
                f"route {number}, visit {at}: commits must be a number of at least 0, got {commits!r}"
            )
    return visits


class _Row:
    """How a request leaves one model."""

    def __init__(self, model: RoutingModel, index: int, lengths: Mapping[int, float] | None) -> None:
        row = list(model.routing[index])
        self.lengths: list[int] = []
        self.length_steps: list[float] = []
        if lengths is not None:
            _check_lengths(index, lengths, leaves=row[index] < 1)
            self.lengths = sorted(length for length, weight in lengths.items() if weight > 0)
            self.length_steps = list(accumulate(lengths[length] for length in self.lengths))
            row[index] = 0.0
        self.targets = [j for j, p in enumerate(row) if p > 0]
        self.target_steps = list(accumulate(row[j] for j in self.targets))


def _check_lengths(index: int, lengths: Mapping[int, float], *, leaves: bool) -> None:
    where = f"run_lengths[{index}]"
    if not leaves:
        raise PlanError(f"{where} is given, but routing[{index}] never leaves the model")
    for length, weight in lengths.items():
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise PlanError(f"{where} has length {length!r}; a run is an integer of at least 1 step")
        if not (math.isfinite(weight) and weight >= 0):
            raise PlanError(
                f"{where} gives length {length} the weight {weight!r}; weights are numbers of at least 0"
            )
    if not any(lengths.values()):
        raise PlanError(f"{where} has no length of positive weight")


def _walk(model: RoutingModel, rows: list[_Row], uniform: Callable[[], float]) -> Iterator[Visit]:
    at = model.entry
    visits = [[Visit(i, commits) for commits in row] for i, row in enumerate(model.commits)]
    while True:
        row = rows[at]
        if row.lengths:
            run = row.lengths[bisect(row.length_steps, uniform() * row.length_steps[-1])]
            stay = visits[at][at]
            for _ in range(run - 1):
                yield stay
        to = row.targets[bisect(row.target_steps, uniform() * row.target_steps[-1])]
        yield visits[at][to]
        at = to
