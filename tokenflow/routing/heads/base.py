"""What every router head gives to routing."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Comparison = Literal[">=", ">", "<"]


class Head(Protocol):
    """A learned score per row: how likely a sampled token is one that another model should write, or not."""

    @property
    def threshold(self) -> float | None:
        """The threshold stored with the head; ``None`` where the format or the file has none."""

    @property
    def comparison(self) -> Comparison:
        """How the published rule compares: the request leaves where ``score <comparison> threshold``."""

    @property
    def excluded(self) -> tuple[int, ...]:
        """Ids that the head makes signals of: they are never sampled, and no probability is given to them."""

    def score(self, hidden: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        """The scores, float32 [B] in [0, 1], of one step.

        :param hidden: hidden states after the final norm, at the positions that gave ``logits``, [B, H].
        :param tokens: sampled token ids, int64 [B].
        :param logits: raw next-token logits, [B, V], with nothing masked.
        """
