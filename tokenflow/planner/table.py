"""Start policies by concurrency: what was planned, and what follows from it for the numbers between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenflow.planner.lookahead import Lookahead
from tokenflow.planner.model import RoutingModel
from tokenflow.planner.policy import StartPolicy, Thresholds, feasible


@dataclass(frozen=True, slots=True)
class Planned:
    """What was found best at one concurrency.

    :param thresholds: fewest requests of a batch, per model.
    :param lookahead: whether the models also look ahead (:class:`Lookahead`).
    :param tokens_per_s: what the model predicts.
    """

    concurrency: int
    thresholds: tuple[int, ...]
    lookahead: bool
    tokens_per_s: float


class PolicyTable:
    """Start policies for any concurrency.

    Thresholds grow about linearly with the concurrency (``docs/planner.md``), so those between two planned
    concurrencies lie on the line between theirs, and those beyond the largest grow in its proportion.
    """

    def __init__(self, model: RoutingModel, planned: Iterable[Planned]) -> None:
        alone = Planned(1, (1,) * model.size, False, 0.0)
        found = {alone.concurrency: alone, **{entry.concurrency: entry for entry in planned}}
        self.model = model
        self.planned = tuple(found[key] for key in sorted(found))
        self._keys = sorted(found)
        self._policies: dict[int, StartPolicy] = {}

    def at(self, concurrency: int) -> StartPolicy:
        """The policy for so many requests; its thresholds can always be met."""
        if concurrency not in self._policies:
            self._policies[concurrency] = self._make(max(concurrency, 1))
        return self._policies[concurrency]

    def _make(self, concurrency: int) -> StartPolicy:
        at = min(bisect_left(self._keys, concurrency), len(self._keys) - 1)
        above, below = self.planned[at], self.planned[max(at - 1, 0)]
        if concurrency > above.concurrency:
            values = [b * concurrency / above.concurrency for b in above.thresholds]
        elif concurrency == above.concurrency:
            values = list(above.thresholds)
        else:
            share = (concurrency - below.concurrency) / (above.concurrency - below.concurrency)
            values = [
                low + (high - low) * share
                for low, high in zip(below.thresholds, above.thresholds, strict=True)
            ]
        thresholds = feasible(self._within_limits(values, concurrency), concurrency)
        if above.lookahead and concurrency > 1:
            return Lookahead.of(self.model, concurrency, thresholds)
        return Thresholds(thresholds)

    def _within_limits(self, values: Sequence[float], concurrency: int) -> list[int]:
        limits = [self.model.batch_limit(i, concurrency) for i in range(self.model.size)]
        return [max(1, min(round(b), limit)) for b, limit in zip(values, limits, strict=True)]
