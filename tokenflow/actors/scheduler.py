"""When each model's next batch starts, by a start policy that sees all models at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenflow.planner.policy import Snapshot, Thresholds, eager

if TYPE_CHECKING:
    from tokenflow.planner import Lookahead


class Scheduler:
    """Answers every idle model's question whether its batch may start.

    Models are told apart by index.  It knows how many requests wait at each and how many run; the policy says
    how long that takes.

    :param waiting: how many requests wait at each model.
    :param clock: seconds; finer than an event loop's, which may stand still for a millisecond.
    """

    def __init__(
        self,
        size: int,
        waiting: Callable[[], Sequence[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy: Thresholds | Lookahead = eager(size)
        self._waiting = waiting
        self._clock = clock
        self._running = [0] * size
        self._started = [0.0] * size

    @property
    def looks_ahead(self) -> bool:
        """Whether what happens at one model may let another one start."""
        return not isinstance(self.policy, Thresholds)

    @property
    def busy(self) -> bool:
        """Whether any model runs."""
        return any(self._running)

    def free_steps(self, index: int, batch: int) -> float:
        """How many more batches of model ``index`` start whatever the others do, after one that starts now.

        As long as nothing comes and nothing else starts: whoever waits for that is asked again then.
        """
        if isinstance(self.policy, Thresholds):
            return math.inf
        return self.policy.free_steps(index, batch, self._running, self._residual_ms(self.policy))

    def began(self, index: int, batch: int) -> None:
        """A batch of model ``index`` started."""
        self._running[index] = batch
        self._started[index] = self._clock()

    def ended(self, index: int) -> None:
        """Model ``index`` is idle."""
        self._running[index] = 0

    def hold_s(self, index: int) -> float:
        """How long idle model ``index`` had better wait: 0 to start now, infinite until something happens."""
        policy, waiting = self.policy, self._waiting()
        if isinstance(policy, Thresholds):
            return 0.0 if waiting[index] >= policy.thresholds[index] else math.inf
        decision = policy.decide(Snapshot(waiting, self._running, self._residual_ms(policy)))
        return 0.0 if index in decision.start else decision.ask_again_ms / 1e3

    def _residual_ms(self, policy: Lookahead) -> list[float]:
        now = self._clock()
        return [
            policy.expected_ms(i, batch) - (now - self._started[i]) * 1e3 if batch else 0.0
            for i, batch in enumerate(self._running)
        ]
