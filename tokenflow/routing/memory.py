"""Windows and momentums: numbers that depend on what something was at a request's earlier steps.

What they keep of a request is a row of float64 numbers, its *state*, all 0 before the first step.  Every step
of the request at the model makes a new one, whatever rule fires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenflow.routing.signals import Signals

Advance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What to do with the number of this step, float64 [B], and the columns kept, float64 [B, width]: the result,
float64 [B], and the columns to keep."""


@dataclass(eq=False, slots=True)
class Memory:
    """One window or momentum.

    ``read`` gives its number of a step, float64 [B].  It has ``width`` columns of the state, from ``start``
    on, which is set once it is known which memories there are.
    """

    read: Callable[[Signals], Tensor]
    advance: Advance
    width: int
    start: int = 0

    def value(self, signals: Signals) -> Tensor:
        """The result of this step, float32 [B]."""
        return self._step(signals)[0].float()

    def kept(self, signals: Signals) -> Tensor:
        """The columns to keep, float64 [B, width]."""
        return self._step(signals)[1]

    def _step(self, signals: Signals) -> tuple[Tensor, Tensor]:
        columns = slice(self.start, self.start + self.width)
        return signals.once(self, lambda: self.advance(self.read(signals), signals.state[:, columns]))


def window(read: Callable[[Signals], Tensor], length: int) -> Memory:
    """The mean over the last ``length`` steps, this one included; over fewer at first.

    Keeps how many earlier steps count, then their numbers, the oldest first.
    """

    def advance(number: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        earlier, *numbers = kept.unbind(1)
        count, numbers = earlier + 1, [*numbers, number]
        # Summed one by one: the order, and so the rounding, must not depend on the batch.
        total = sum(numbers, torch.zeros_like(number))
        return total / count, torch.stack([count.clamp_max(length - 1), *numbers[1:]], 1)

    return Memory(read, advance, length)


def momentum(read: Callable[[Signals], Tensor], share: float) -> Memory:
    """An exponential average: s becomes share s + (1 - share) x, from s = 0.  Keeps s."""

    def advance(number: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        average = share * kept[:, 0] + (1 - share) * number
        return average, average.unsqueeze(1)

    return Memory(read, advance, 1)
