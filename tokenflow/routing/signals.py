"""Routing signals: what rules see of one step, for every row of the batch at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_FLOOR = -1e4
"""Finite stand-in for -inf, the log-probability of an impossible id: exp of it is 0 in float32, and 0 times
it is 0."""

_ZERO = torch.tensor(0.0)

Value = TypeVar("Value")
Own = TypeVar("Own", bound="Signals")


def computed(compute: Callable[[Own], Value]) -> Callable[[Own], Value]:
    """Decorate what signals compute: when first asked for, and once."""
    name = compute.__name__

    @wraps(compute)
    def signal(self: Own) -> Value:
        known = self._known
        if name not in known:
            known[name] = compute(self)
        value: Value = known[name]
        return value

    return signal


class Signals:
    """The signals of a batch of B rows; each is computed when first asked for, and once.

    All are computed in float32 from the raw logits over their full width V, before masking, penalties and
    temperature.  A row's values do not depend on the other rows.

    What no rule reads may be left out.

    :param logits: raw next-token logits, [B, V] with V >= 2, any floating dtype; -inf is allowed.
    :param tokens: sampled token ids, int64 [B].
    :param positions: index of each sampled token in its output, from 0, int64 [B].
    :param run_lengths: tokens committed by this model since the request came to it, the sampled one
        included, int64 [B].
    :param params: the recipe's parameters, each float32 [B].
    :param excluded: ids that are no words of the vocabulary (a deferral row, say), int64 [n]: probability
        0 to them.  Entropy is normalised by the full width V all the same, so that thresholds compare.
    :param draws: uniform in [0, 1) for the position after each sampled token, float64 [B].
    :param hidden: last hidden states after the final norm, [B, H], for router heads.
    :param tails: output tokens before each sampled one, the latest last, -1 where there are none,
        int64 [B, T]; T is at least what the rules say.
    :param state: what windows and momentums kept of each request's earlier steps, S numbers each; zeros at
        its first.  S is what the rules say.
    """

    __slots__ = (
        "_draws",
        "_excluded",
        "_hidden",
        "_known",
        "_logits",
        "_params",
        "_positions",
        "_run_lengths",
        "_state",
        "_tails",
        "_tokens",
    )

    def __init__(
        self,
        logits: Tensor,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        run_lengths: Tensor | None = None,
        params: Mapping[str, Tensor] | None = None,
        excluded: Tensor | None = None,
        draws: Tensor | None = None,
        hidden: Tensor | None = None,
        tails: Tensor | None = None,
        state: Sequence[list[float]] | None = None,
    ) -> None:
        self._logits = logits
        self._tokens = tokens
        self._params: Mapping[str, Tensor] = {} if params is None else params
        self._positions = positions
        self._run_lengths = run_lengths
        self._excluded = excluded
        self._draws = draws
        self._hidden = hidden
        self._tails = tails
        self._state = state
        self._known: dict[object, Any] = {}

    def once(self, key: object, compute: Callable[[], Value]) -> Value:
        """What ``compute`` gives, computed when first asked for under this key."""
        if key not in self._known:
            self._known[key] = compute()
        value: Value = self._known[key]
        return value

    @property
    def token(self) -> Tensor:
        """Sampled token ids, int64 [B]."""
        return _given(self._tokens, "tokens")

    @property
    def names(self) -> Collection[str]:
        """Names of the recipe's parameters."""
        return self._params

    def param(self, name: str) -> Tensor:
        """A parameter of the recipe, float32 [B]."""
        return self._params[name]

    @property
    def position(self) -> Tensor:
        """Index of the sampled token in the output, from 0, int64 [B]."""
        return _given(self._positions, "positions")

    @property
    def run_length(self) -> Tensor:
        """Tokens committed by this model since the request came, the sampled one included, int64 [B]."""
        return _given(self._run_lengths, "run lengths")

    @property
    def draw(self) -> Tensor:
        """Uniform in [0, 1) for the position after the sampled token, float64 [B]."""
        return _given(self._draws, "random numbers")

    @property
    def hidden(self) -> Tensor:
        """Last hidden states after the final norm, [B, H]."""
        return _given(self._hidden, "hidden states")

    @property
    def tails(self) -> Tensor:
        """Output tokens before the sampled one, the latest last, -1 where there are none, int64 [B, T]."""
        return _given(self._tails, "latest tokens")

    @property
    def state(self) -> Sequence[list[float]]:
        """What windows and momentums kept of earlier steps: S numbers for each row."""
        return _given(self._state, "states")

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return len(self._logits)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self._logits.device

    @property
    def raw(self) -> Tensor:
        """The logits as they were given, excluded ids and all, [B, V]."""
        return self._logits

    @computed
    def probs(self) -> Tensor:
        """Probabilities, float32 [B, V]."""
        return torch.softmax(self.logits(), -1)

    @computed
    def logits(self) -> Tensor:
        """Raw logits, float32 [B, V]; -inf for excluded ids."""
        logits = self._logits.float()
        return logits if self._excluded is None else logits.index_fill(-1, self._excluded, -math.inf)

    @computed
    def entropy(self) -> Tensor:
        """Normalised entropy, float32 [B] in [0, 1]: H / ln V with H as in :meth:`entropy_nats`.

        The routing signal of R-Stitch (arXiv 2507.17307, section 3).
        """
        return (self.entropy_nats() / _ln(self._logits.shape[-1])).clamp_max_(1.0)

    @computed
    def entropy_nats(self) -> Tensor:
        """Entropy H = -sum p ln p of the next-token distribution, in nats, float32 [B] (Shannon 1948)."""
        logprobs = torch.log_softmax(self.logits(), -1).clamp_min_(_FLOOR)
        return _ZERO - logprobs.mul_(self.probs()).sum(-1)

    @computed
    def confidence(self) -> Tensor:
        """The largest probability, float32 [B]."""
        return self.probs().amax(-1)

    @computed
    def margin(self) -> Tensor:
        """The largest probability minus the second largest, float32 [B]."""
        first, second = self.probs().topk(2).values.unbind(-1)
        return first - second

    @computed
    def logprob(self) -> Tensor:
        """Log-probability of the sampled token at temperature 1, without truncation, in nats, float32 [B]."""
        return torch.log_softmax(self.logits(), -1).gather(-1, self.token.unsqueeze(-1)).squeeze(-1)


@cache
def _ln(width: int) -> Tensor:
    """ln of a number as a tensor, by which others are divided faster than by a number."""
    return torch.tensor(math.log(width), dtype=torch.float32)


def column(values: Sequence[object], dtype: type[np.generic], device: torch.device) -> Tensor:
    """A number, or a row of numbers, of each request as a tensor: by way of numpy, in half the time."""
    made = torch.from_numpy(np.array(values, dtype=dtype))
    return made if device.type == "cpu" else made.to(device)


def _given(value: Value | None, name: str) -> Value:
    if value is None:
        raise LookupError(f"the {name} of the rows were not given")
    return value
