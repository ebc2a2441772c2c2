"""When an idle model starts its next batch: what is known, what is decided, and the static answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Snapshot(NamedTuple):
    """All models at one instant; three sequences of length M.

    :param queued: requests that wait at each model.
    :param running: requests in each model's running batch; 0 where it is idle.
    :param residual_ms: expected time until each running batch ends; negative where it is overdue, and
        without meaning where the model is idle.
    """

    queued: Sequence[int]
    running: Sequence[int]
    residual_ms: Sequence[float]


class Decision(NamedTuple):
    """Which idle models start now, with all that waits up to their batch limits.

    ``ask_again_ms``, greater than 0, is the longest time to wait before the next question; a batch that ends
    or a request that arrives raises it earlier.
    """

    start: tuple[int, ...]
    ask_again_ms: float = math.inf


class StartPolicy(Protocol):
    """A pure rule; it must start something whenever no model runs."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """What starts now."""
        ...


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Delayed batching (TokenRouter, arXiv 2610.12242, section 4): model i starts when ``values[i]`` wait."""

    values: tuple[int, ...]

    def decide(self, snapshot: Snapshot) -> Decision:
        """Start every idle model whose threshold is reached."""
        waiting = zip(snapshot.queued, snapshot.running, self.values, strict=True)
        return Decision(tuple(i for i, (k, b, least) in enumerate(waiting) if not b and k >= least))


def feasible(thresholds: Sequence[int], concurrency: int) -> tuple[int, ...]:
    """Lower thresholds, the largest first, until ``concurrency`` requests cannot all wait below them.

    The rule is sum(B_i - 1) < N (TokenRouter, arXiv 2610.12242, section 4).  With it, when every active
    request waits at some model and none runs, at least one model has reached its threshold: there is no
    deadlock to detect.
    """
    lowered = list(thresholds)
    excess = sum(lowered) - len(lowered) - max(concurrency - 1, 0)
    for _ in range(excess):
        lowered[lowered.index(max(lowered))] -= 1
    return tuple(lowered)


def eager(size: int) -> Thresholds:
    """Every one of ``size`` models starts as soon as a request waits."""
    return Thresholds((1,) * size)
