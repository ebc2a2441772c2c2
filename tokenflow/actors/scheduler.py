"""When each model's next batch starts, by a start policy that sees all models at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from tokenflow.planner.policy import Snapshot, StartPolicy, Thresholds, eager


class Scheduler:
    """Answers every model's question whether its batch may start now.

    It knows how many requests wait at each model, how many run, and when they should be back.

    :param step_ms: expected milliseconds of a step, by index of the model and batch size.
    :param waiting: how many requests wait at each model.
    """

    def __init__(self, size: int, waiting: Callable[[], Sequence[int]]) -> None:
        self.policy: StartPolicy = eager(size)
        self._waiting = waiting
        self._running = [0] * size
        self._ends = [0.0] * size

    def began(self, index: int, batch: int, expected_s: float) -> None:
        """A batch of model ``index`` started, and should take so long."""
        self._running[index] = batch
        self._ends[index] = asyncio.get_running_loop().time() + expected_s

    def ended(self, index: int) -> None:
        """Model ``index`` is idle."""
        self._running[index] = 0

    def hold_s(self, index: int) -> float:
        """How long idle model ``index`` had better wait: 0 to start now, infinite until something happens."""
        if isinstance(self.policy, Thresholds):
            return 0.0 if self._waiting()[index] >= self.policy.values[index] else math.inf
        now = asyncio.get_running_loop().time()
        residual_ms = [(end - now) * 1e3 for end in self._ends]
        decision = self.policy.decide(Snapshot(self._waiting(), self._running, residual_ms))
        return 0.0 if index in decision.start else decision.ask_again_ms / 1e3
