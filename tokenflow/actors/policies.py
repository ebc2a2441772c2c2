"""Which start policy holds now: by the recipe, the number of active requests, and what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenflow.planner.policy import Thresholds, feasible

if TYPE_CHECKING:
    from tokenflow.planner import Lookahead, PolicyTable


class Policies:
    """Start policies whose thresholds can be met by the requests that there are.

    :param thresholds: of each model, where nothing is planned.
    """

    def __init__(self, thresholds: Sequence[int]) -> None:
        self._thresholds = tuple(thresholds)
        self._table: PolicyTable | None = None
        self._made: dict[tuple[int, tuple[int, ...]], Thresholds | Lookahead] = {}

    def use(self, table: PolicyTable) -> None:
        """From now on, what was planned counts."""
        self._table = table
        self._made.clear()

    def at(self, concurrency: int, reach: tuple[int, ...]) -> Thresholds | Lookahead:
        """The policy for so many active requests, of which ``reach`` can still come to each model.

        A model waits for no more than can come, and all together never for more than there are.
        """
        key = concurrency, reach
        if key not in self._made:
            self._made[key] = self._make(concurrency, reach)
        return self._made[key]

    def _make(self, concurrency: int, reach: tuple[int, ...]) -> Thresholds | Lookahead:
        planned = Thresholds(self._thresholds) if self._table is None else self._table.at(concurrency)
        most = [min(b, max(count, 1)) for b, count in zip(planned.thresholds, reach, strict=True)]
        return replace(planned, thresholds=feasible(most, concurrency))
