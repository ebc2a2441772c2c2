"""Windows and momentums: numbers that depend on what something was at a request's earlier steps.

What they keep of a request is a list of numbers, its *state*, all 0 before the first step.  Every step of the
request at the model makes a new one, whatever rule fires.  They compute in Python's floats: a batch has few
rows, and states come and go as lists.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain

import numpy as np
from torch import Tensor

from tokenflow.routing.signals import Signals, column

Numbers = list[float]
Advance = Callable[[float, Numbers], tuple[float, Numbers]]
"""What to do with the number of this step and those that were kept: the result, and the numbers to keep."""


@dataclass(eq=False, slots=True)
class Memory:
    """One window or momentum.

    ``read`` gives its number of a step, [B].  Of the state it has ``width`` numbers, from ``start`` on, which
    is set once it is known which memories there are.
    """

    read: Callable[[Signals], Tensor]
    advance: Advance
    width: int
    start: int = 0

    def value(self, signals: Signals) -> Tensor:
        """The result of this step, float32 [B]."""
        with np.errstate(over="ignore"):  # beyond float32 is infinity, as everywhere
            return column([value for value, _ in self._step(signals)], np.float32, signals.device)

    def kept(self, signals: Signals) -> list[Numbers]:
        """The numbers to keep, ``width`` for each row."""
        return [kept for _, kept in self._step(signals)]

    def _step(self, signals: Signals) -> list[tuple[float, Numbers]]:
        start, end = self.start, self.start + self.width

        def advance() -> list[tuple[float, Numbers]]:
            numbers: Numbers = self.read(signals).tolist()
            rows = zip(numbers, signals.state, strict=True)
            return [self.advance(number, state[start:end]) for number, state in rows]

        return signals.once(self, advance)


def window(read: Callable[[Signals], Tensor], length: int) -> Memory:
    """The mean over the last ``length`` steps, this one included; over fewer at first.

    Keeps how many earlier steps count, then their numbers, the oldest first.
    """

    def advance(number: float, kept: Numbers) -> tuple[float, Numbers]:
        earlier, *numbers = kept
        numbers.append(number)
        # One by one from the oldest: ``sum`` rounds otherwise from Python 3.12 on.
        mean = reduce(operator.add, numbers) / (earlier + 1)
        return mean, [min(earlier + 1, length - 1), *numbers[1:]]

    return Memory(read, advance, length)


def momentum(read: Callable[[Signals], Tensor], share: float) -> Memory:
    """An exponential average: s becomes share s + (1 - share) x, from s = 0.  Keeps s."""

    def advance(number: float, kept: Numbers) -> tuple[float, Numbers]:
        average = share * kept[0] + (1 - share) * number
        return average, [average]

    return Memory(read, advance, 1)


@dataclass(frozen=True, slots=True)
class Memories:
    """All memories of a model, each with its numbers; the state of a request has ``width``."""

    each: tuple[Memory, ...]
    width: int

    @staticmethod
    def of(memories: Sequence[Memory]) -> Memories:
        """Give each its numbers, one after the other."""
        *starts, width = accumulate((memory.width for memory in memories), initial=0)
        for memory, start in zip(memories, starts, strict=True):
            memory.start = start
        return Memories(tuple(memories), width)

    def kept(self, signals: Signals) -> list[Numbers]:
        """The state of each row after this step; it depends on that row alone.  Without memories: none."""
        parts = [memory.kept(signals) for memory in self.each]
        return [[*chain.from_iterable(row)] for row in zip(*parts, strict=True)]
