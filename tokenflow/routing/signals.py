"""Routing signals: what rules see of one step, for every row of the batch at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps

import torch
from torch import Tensor

_FLOOR = -1e4
"""Finite stand-in for a log-probability of -inf, so that 0 * log 0 is 0; exp of it is 0 in float32."""


def _once(compute: Callable[[Signals], Tensor]) -> Callable[[Signals], Tensor]:
    @wraps(compute)
    def signal(self: Signals) -> Tensor:
        value = self._known.get(compute.__name__)
        if value is None:
            value = self._known[compute.__name__] = compute(self)
        return value

    return signal


class Signals:
    """The signals of a batch of B rows; each is computed when first asked for, and once.

    All are computed in float32 from the raw logits over their full width V, before masking, penalties and
    temperature.  A row's values do not depend on the other rows.

    :param logits: raw next-token logits, [B, V] with V >= 2, any floating dtype; -inf is allowed.
    :param tokens: sampled token ids, int64 [B].
    :param positions: index of each sampled token in its output, from 0, int64 [B]; may be left out if no
        rule uses it.
    :param run_lengths: tokens committed by this model since the request came to it, the sampled one
        included, int64 [B]; may be left out if no rule uses it.
    :param params: the recipe's parameters, each float32 [B].
    :param excluded: ids that are no words of the vocabulary (a deferral row, say), int64 [n]: probability
        0 to them.  Entropy is normalised by the full width V all the same, so that thresholds compare.
    """

    __slots__ = ("_excluded", "_known", "_logits", "_positions", "_run_lengths", "params", "token")

    def __init__(
        self,
        logits: Tensor,
        tokens: Tensor,
        positions: Tensor | None = None,
        run_lengths: Tensor | None = None,
        params: Mapping[str, Tensor] | None = None,
        excluded: Tensor | None = None,
    ) -> None:
        self.token = tokens
        self.params: Mapping[str, Tensor] = {} if params is None else params
        self._logits = logits
        self._positions = positions
        self._run_lengths = run_lengths
        self._excluded = excluded
        self._known: dict[str, Tensor] = {}

    @property
    def position(self) -> Tensor:
        """Index of the sampled token in the output, from 0, int64 [B]."""
        return _given(self._positions, "positions")

    @property
    def run_length(self) -> Tensor:
        """Tokens committed by this model since the request came, the sampled one included, int64 [B]."""
        return _given(self._run_lengths, "run lengths")

    @_once
    def log_probs(self) -> Tensor:
        """Natural-log probabilities, float32 [B, V]."""
        return torch.log_softmax(self.logits(), -1)

    @_once
    def probs(self) -> Tensor:
        """Probabilities, float32 [B, V]."""
        return torch.softmax(self.logits(), -1)

    @_once
    def logits(self) -> Tensor:
        """Raw logits, float32 [B, V]; -inf for excluded ids."""
        logits = self._logits.float()
        return logits if self._excluded is None else logits.index_fill(-1, self._excluded, -math.inf)

    @_once
    def entropy(self) -> Tensor:
        """Normalised entropy, float32 [B] in [0, 1]: H / ln V with H as in :meth:`entropy_nats`.

        The routing signal of R-Stitch (arXiv 2507.17307, section 3).
        """
        return self.entropy_nats().div(math.log(self._logits.shape[-1])).clamp_max_(1.0)

    @_once
    def entropy_nats(self) -> Tensor:
        """Entropy H = -sum p ln p = lse(z) - sum p z of the next-token distribution, in nats, float32 [B].

        Shannon's formula (1948) as a sum of terms of one sign, where 0 ln 0 = 0.
        """
        return self.log_probs().clamp_min(_FLOOR).mul_(self.probs()).sum(-1).abs_()

    @_once
    def confidence(self) -> Tensor:
        """The largest probability, float32 [B]."""
        return self.probs().amax(-1)

    @_once
    def margin(self) -> Tensor:
        """The largest probability minus the second largest, float32 [B]."""
        first, second = self.probs().topk(2).values.unbind(-1)
        return first - second

    @_once
    def logprob(self) -> Tensor:
        """Log-probability of the sampled token at temperature 1, without truncation, in nats, float32 [B]."""
        return self.log_probs().gather(-1, self.token.unsqueeze(-1)).squeeze(-1)


def _given(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise LookupError(f"the {name} of the rows were not given")
    return value
