"""What is measured while serving: where steps lead, and how long they take by batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenflow.errors import PlanError

if TYPE_CHECKING:
    from tokenflow.planner import RoutingModel

_MEMORY_ROWS = 1000
"""The routing of so many rows is remembered: older ones fade, so that a change of the load is followed."""
_MEMORY_STEPS = 100
_ENOUGH_ROWS, _ENOUGH_STEPS = 100, 10
_OUTLIER = 3.0
_RARE = 0.005
"""Less than this share of a model's steps counts as never: it changes no plan, and makes planning long."""
_FLAT = 0.04
"""Batch sizes whose latencies differ by less than this share count as equally fast."""
_QUANTA, _FEWEST_QUANTA = 60, 15
"""Into so many parts the fastest step is cut when batches are planned; into fewer, where steps vary."""


class Meter:
    """Routing and latencies of M models, which are told apart by index.

    :param names: of the models, for messages.
    :param entry: index of the model where requests begin.
    :ivar batch_limit: most requests in one step; None if there is no limit.
    """

    def __init__(self, names: Sequence[str], entry: int) -> None:
        size = len(names)
        self._names = tuple(names)
        self._entry = entry
        self.batch_limit: int | None = None
        self._new = [[0] * size for _ in names]
        self._new_tokens = [[0] * size for _ in names]
        self._rows = [[0.0] * size for _ in names]
        self._tokens = [[0.0] * size for _ in names]
        self._latencies: list[dict[int, _Average]] = [{} for _ in names]

    @property
    def size(self) -> int:
        """M, the number of models."""
        return len(self._names)

    def moved(self, here: int, to: int, tokens: int) -> None:
        """A step at model ``here`` made ``tokens`` of a request final; it goes on at model ``to``."""
        self._new[here][to] += 1
        self._new_tokens[here][to] += tokens

    def stepped(self, here: int, batch: int, seconds: float) -> None:
        """A step with so many requests took so long, from its frame being sent to its reply being read."""
        self._latencies[here].setdefault(batch, _Average()).add(seconds)
        for other, average in self._latencies[here].items():
            if other != batch:
                average.weight *= 1 - 1 / _MEMORY_ROWS

    def fold(self) -> None:
        """Add what was counted since the last call to what is remembered, and let that fade."""
        for here, new in enumerate(self._new):
            keep = max(0.0, 1 - sum(new) / _MEMORY_ROWS)
            for to, count in enumerate(new):
                self._rows[here][to] = self._rows[here][to] * keep + count
                self._tokens[here][to] = self._tokens[here][to] * keep + self._new_tokens[here][to]
            self._new[here] = [0] * len(new)
            self._new_tokens[here] = [0] * len(new)

    @property
    def missing(self) -> list[str]:
        """What there is too little of to plan with, in words; nothing where all is known."""
        todo, seen, missing = [self._entry], {self._entry}, []
        while todo:
            here = todo.pop()
            if sum(self._rows[here]) < _ENOUGH_ROWS:
                missing.append(f"where {self._names[here]} leads")
            if sum(average.count for average in self._latencies[here].values()) < _ENOUGH_STEPS:
                missing.append(f"how long a step of {self._names[here]} takes")
            reached = {to for to, rows in enumerate(self._rows[here]) if rows >= 1} - seen
            seen |= reached
            todo += reached
        return missing

    @property
    def jitter(self) -> float:
        """How much steps of the same model and size vary: the mean deviation, relative to the mean."""
        averages = [average for sizes in self._latencies for average in sizes.values()]
        weight = sum(average.weight for average in averages)
        return sum(average.spread * average.weight for average in averages) / weight if weight else 0.0

    def model(self) -> RoutingModel:
        """The routing model that fits what was measured.

        :raises PlanError: if too little was.
        """
        from tokenflow.planner import RoutingModel

        if missing := self.missing:
            raise PlanError(f"too few steps were measured to say {' or '.join(missing)}")
        size = len(self._names)
        routing, commits = [], []
        for here, rows in enumerate(self._rows):
            total = sum(rows)
            # A model that nobody came to leads nowhere, and what hardly ever happens makes no difference.
            often = [count if count >= _RARE * total else 0.0 for count in rows]
            kept = sum(often)
            routing.append([count / kept if kept else float(to == here) for to, count in enumerate(often)])
            commits.append(
                [max(t, 0.0) / n if n else 0.0 for t, n in zip(self._tokens[here], rows, strict=True)]
            )
        tables = [_table(averages) for averages in self._latencies]
        fastest = min(value for table in tables for value in table.values())
        return RoutingModel(
            routing=routing,
            commits=commits,
            latency_ms=[table or {1: fastest} for table in tables] if size else [],
            quantum_ms=_quantum_ms(fastest, self.jitter),
            batch_limits=[self.batch_limit] * size,
            entry=self._entry,
        )


class _Average:
    """A mean of seconds that follows the last hundred or so; ``spread`` is the mean relative deviation."""

    __slots__ = ("count", "mean", "spread", "weight")

    def __init__(self) -> None:
        self.mean = 0.0
        self.spread = 0.0
        self.count = 0
        self.weight = 0.0

    def add(self, seconds: float) -> None:
        self.count = min(self.count + 1, _MEMORY_STEPS)
        self.weight = min(self.weight + 1, _MEMORY_STEPS)
        if self.count > 5:
            seconds = min(seconds, _OUTLIER * self.mean)
        self.mean += (seconds - self.mean) / self.count
        self.spread += (abs(seconds / self.mean - 1) - self.spread) / self.count


def _table(averages: dict[int, _Average]) -> dict[int, float]:
    """Milliseconds by batch size: one number where size makes no difference, else never falling."""
    known = {size: average for size, average in sorted(averages.items()) if average.weight >= 1}
    total = sum(average.weight for average in known.values())
    if not total:
        return {}
    mean = sum(average.mean * average.weight for average in known.values()) / total
    if all(abs(average.mean - mean) <= _FLAT * mean for average in known.values()):
        return {1: mean * 1e3}
    return {size: value * 1e3 for size, value in _levels(known).items()}


def _levels(averages: dict[int, _Average]) -> dict[int, float]:
    """Isotonic regression in few levels: neighbours in the wrong order, or nearly equal, share their mean."""
    pools: list[tuple[list[int], float, float]] = []
    for size, average in averages.items():
        sizes, mean, weight = [size], average.mean, average.weight
        while pools and pools[-1][1] * (1 + _FLAT) >= mean:
            before, other, more = pools.pop()
            sizes, mean, weight = (
                before + sizes,
                (other * more + mean * weight) / (more + weight),
                more + weight,
            )
        pools.append((sizes, mean, weight))
    return {size: mean for sizes, mean, _ in pools for size in (sizes[0], sizes[-1])}


def _quantum_ms(fastest_ms: float, jitter: float) -> float:
    """A round number of which the fastest step takes about sixty, or fewer: no finer than steps repeat."""
    quantum = fastest_ms / max(_FEWEST_QUANTA, min(_QUANTA, 1 / max(jitter, 1e-3)))
    digits = 1 - math.floor(math.log10(quantum))
    return round(quantum, digits)
