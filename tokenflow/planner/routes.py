"""Routes of single requests: which model runs each decode step, and how many tokens that step commits."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tokenflow.errors import PlanError
from tokenflow.planner.model import RoutingModel


class Visit(NamedTuple):
    """One decode step of one request."""

    model: int
    commits: float


Route = Sequence[Visit] | Sequence[tuple[int, float]]
"""All visits of one request, in order."""


def draw_route(model: RoutingModel, source: random.Random) -> Iterator[Visit]:
    """An endless random route.

    Where the model gives run lengths, one is drawn when the request arrives, and the other entries of the
    routing row say where it goes when the run is over.
    """
    rows = [_Row(model, i) for i in range(model.size)]
    uniform = source.random
    at = model.entry
    while True:
        row = rows[at]
        if row.lengths:
            for _ in range(row.lengths[bisect(row.length_steps, uniform() * row.length_steps[-1])] - 1):
                yield row.visits[at]
        to = row.targets[bisect(row.target_steps, uniform() * row.target_steps[-1])]
        yield row.visits[to]
        at = to


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
    """How a request leaves one model: what there is to draw from, with running sums of the weights."""

    def __init__(self, model: RoutingModel, index: int) -> None:
        assert model.run_lengths is not None
        runs = dict(model.run_lengths[index] or ())
        row = [p if j != index or not runs else 0.0 for j, p in enumerate(model.routing[index])]
        self.lengths = list(runs)
        self.length_steps = list(accumulate(runs.values()))
        self.targets = [j for j, p in enumerate(row) if p > 0]
        self.target_steps = list(accumulate(row[j] for j in self.targets))
        self.visits = [Visit(index, commits) for commits in model.commits[index]]
