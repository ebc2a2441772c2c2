"""From raw logits to tokens: masks, bias, penalties, temperature, truncation and the draw itself.

Every row is treated by itself: what it gets depends on its own logits and request only, never on the rows
beside it.  The logits are never written to: routing signals are taken from them afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokenflow.random import uniform
from tokenflow.types import Logprob, SamplingParams

_NUCLEUS = 512
"""Largest probabilities that are sorted first for ``top_p``; a flatter distribution is sorted whole."""

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures are clamped to what float32 survives; beyond, a draw is greedy among equals, or uniform."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's request.

    :param tokens: prompt and committed output; may be a live list that grows between calls.
    :param prompt_tokens: how many of them are the prompt.
    :param plain: whether the token is the most probable one of the raw logits, and nothing else is asked.
    """

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    prompt_tokens: int
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        p = self.params
        penalised = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        asked = p.logprobs or p.top_logprobs or p.logit_bias or p.min_tokens
        object.__setattr__(self, "plain", p.greedy and not penalised and not asked)

    @property
    def position(self) -> int:
        """Output position, from 0, of the token to draw."""
        return len(self.tokens) - self.prompt_tokens

    def at(self, length: int) -> Draw:
        """The same request when it had only ``length`` tokens."""
        return Draw(self.params, self.seed, self.tokens[:length], self.prompt_tokens)

    def among(self, count: int) -> Draw:
        """The same request, to be drawn from the ``count`` most probable tokens at most."""
        if self.params.greedy or 0 < self.params.top_k <= count:
            return self
        return Draw(replace(self.params, top_k=count), self.seed, self.tokens, self.prompt_tokens)


class Sampled(NamedTuple):
    """A row's token; its log-probability and the best alternatives where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


class Sampler:
    """Draws tokens for the model with code ``code``.

    :param vocab_limit: ids from here on, where logits are padded beyond the tokenizer, are never drawn.
    :param eos_token_ids: not drawn before a request's ``min_tokens``.
    :param excluded: ids below the limit that are no words of the vocabulary, never drawn.
    """

    def __init__(
        self, code: int, vocab_limit: int, eos_token_ids: Sequence[int], excluded: Sequence[int] = ()
    ) -> None:
        self._code = code
        self._limit = vocab_limit
        self._eos = tuple(eos_token_ids)
        self._excluded = [token for token in excluded if token < vocab_limit]

    def __call__(
        self, logits: Tensor, draws: Sequence[Draw], best: Sequence[int] | None = None
    ) -> list[Sampled]:
        """Draw one token per row of raw ``logits``, float32 [B, V].

        Every row must have something to draw (see :func:`unusable_rows`).

        :param best: the ids of the rows' :func:`peaks`, if they are known.
        """
        special = [index for index, draw in enumerate(draws) if not draw.plain]
        if best is not None and not special and not self._excluded:
            return [Sampled(token) for token in best]
        legal = logits[:, : self._limit]
        if self._excluded:
            legal = legal.clone()
            legal[:, self._excluded] = -torch.inf
        drawn: list[Sampled] = []
        if special:
            drawn = self._draw(legal[special].float(), [draws[index] for index in special])
            if len(special) == len(draws):
                return drawn
        results = [Sampled(token) for token in legal.argmax(-1).tolist()]
        for index, sampled in zip(special, drawn, strict=True):
            results[index] = sampled
        return results

    def _draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
        """Draw from ``logits``, a copy that may be written to."""
        for row, draw in zip(logits, draws, strict=True):
            self._adjust(row, draw)
        logits -= logits.amax(-1, keepdim=True)
        tokens: list[int] = logits.argmax(-1).tolist()
        warm = [index for index, draw in enumerate(draws) if not draw.params.greedy]
        if warm:
            some = [draws[index] for index in warm]
            logits[warm] = shaped = _shape(logits[warm], [draw.params for draw in some])
            for index, token in zip(warm, self._invert(shaped, some), strict=True):
                tokens[index] = token
        rows = zip(logits, tokens, draws, strict=True)
        return [_report(row, token, draw.params) for row, token, draw in rows]

    def _adjust(self, row: Tensor, draw: Draw) -> None:
        """Mask, bias and penalise one row in place."""
        params = draw.params
        if draw.position < params.min_tokens:
            _forbid(row, (*self._eos, *params.stop_token_ids))
        if params.logit_bias:
            _change(row, params.logit_bias, torch.add)
        if params.repetition_penalty != 1:
            _change(row, dict.fromkeys(draw.tokens, params.repetition_penalty), _repel)
        if params.presence_penalty or params.frequency_penalty:
            counts = Counter(draw.tokens[draw.prompt_tokens :])
            presence, frequency = params.presence_penalty, params.frequency_penalty
            _change(row, {token: presence + frequency * n for token, n in counts.items()}, torch.sub)

    def _invert(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """Inverse-CDF sampling, in float64 and in the order of the ids."""
        mass = logits.double().exp_().cumsum(-1)
        numbers = [
            uniform(draw.seed, draw.params.choice, draw.position, self._code, "token") for draw in draws
        ]
        # The largest number, 1 - 2**-53, still gives a point below the total.
        points = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * mass[:, -1:]
        tokens: list[int] = torch.searchsorted(mass, points, right=True)[:, 0].tolist()
        return tokens


class Peaks(NamedTuple):
    """The largest logit of each row, NaN if one is, and the lowest id that has it."""

    logits: list[float]
    ids: list[int]


def peaks(logits: Tensor, vocab_limit: int) -> Peaks:
    """The peaks of ``logits``, float32 [B, V], among the ids below ``vocab_limit``; reads the logits once."""
    legal = logits if vocab_limit >= logits.shape[1] else logits[:, :vocab_limit]
    if logits.is_cpu:  # by way of numpy, which takes a third of the time
        rows = legal.numpy()
        best = rows.argmax(-1).tolist()
        return Peaks([rows.item(row, token) for row, token in enumerate(best)], best)
    ids = legal.argmax(-1)
    return Peaks(legal.gather(1, ids[:, None])[:, 0].tolist(), ids.tolist())


def unusable_rows(logits: Tensor, vocab_limit: int, best: Sequence[float]) -> set[int]:
    """Rows of ``logits`` [B, V] that no token can be drawn from.

    Those are rows with NaN or +infinity anywhere, or without a finite value below ``vocab_limit``; -infinity
    for some tokens is fine.

    :param best: the logits of the rows' :func:`peaks`.
    """
    unusable = {row for row, value in enumerate(best) if not math.isfinite(value)}
    if vocab_limit < logits.shape[1]:
        padding: list[float] = logits[:, vocab_limit:].amax(-1).tolist()
        unusable |= {row for row, value in enumerate(padding) if not value < math.inf}
    return unusable


def _change(row: Tensor, amounts: Mapping[int, float], change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change the logits of some tokens in place; finite ones stay finite, masked ones stay masked."""
    ids = [token for token in amounts if token < len(row)]
    values = row[ids].double()
    amount = torch.tensor([amounts[token] for token in ids], dtype=torch.float64, device=row.device)
    changed = change(values, amount).clamp(-_LARGEST, _LARGEST)
    row[ids] = torch.where(values.isinf(), values, changed).to(row.dtype)


def _repel(values: Tensor, penalty: Tensor) -> Tensor:
    """The repetition penalty of CTRL (Keskar et al. 2019, section 4.1), with the sign of the logit minded."""
    return torch.where(values > 0, values / penalty, values * penalty)


def _forbid(row: Tensor, tokens: Sequence[int]) -> None:
    """Mask ``tokens``, unless nothing else is left to draw."""
    ids = [token for token in set(tokens) if token < len(row)]
    kept = row[ids]
    row[ids] = float("-inf")
    if row.amax() == float("-inf"):
        row[ids] = kept


def _shape(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature and truncation: logits of the distributions to draw from, with a maximum of 0.

    ``logits`` have a maximum of 0.  Truncation keeps every token that is as probable as the last one kept,
    so that it does not depend on how ties are sorted.
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    width = logits.shape[1]
    logits = logits / column([p.temperature for p in params]).clamp(_COLDEST, _HOTTEST).float()
    limits = [p.top_k if 0 < p.top_k < width else 0 for p in params]
    if any(limits):
        best = logits.topk(max(limits), -1).values
        least = best.gather(1, torch.tensor(limits, device=logits.device)[:, None].sub(1).clamp_min(0))
        limited = torch.tensor(limits, device=logits.device)[:, None] > 0
        logits = logits.masked_fill(limited & (logits < least), float("-inf"))
    nuclear = [index for index, p in enumerate(params) if p.top_p < 1]
    if nuclear:
        logits[nuclear] = _nucleus(logits[nuclear], column([params[index].top_p for index in nuclear]))
    if any(p.min_p > 0 for p in params):
        logits = logits.masked_fill(logits < column([p.min_p for p in params]).log(), float("-inf"))
    return logits


def _nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the most probable tokens whose mass reaches ``top_p``, [B, 1] (Holtzman et al. 2020)."""
    width = logits.shape[1]
    total = logits.double().exp_().sum(-1, keepdim=True)
    for count in (min(_NUCLEUS, width), width):
        best = logits.topk(count, -1).values
        reached = best.double().exp_().cumsum(-1) >= top_p * total
        if reached[:, -1].all():
            break
    last = torch.where(reached.any(-1), reached.int().argmax(-1), width - 1)
    return logits.masked_fill(logits < best.gather(1, last[:, None]), float("-inf"))


def _report(logits: Tensor, token: int, params: SamplingParams) -> Sampled:
    if not params.logprobs and not params.top_logprobs:
        return Sampled(token)
    logprobs = logits.log_softmax(-1)
    return Sampled(token, float(logprobs[token]), _best(logprobs, params.top_logprobs))


def _best(logprobs: Tensor, count: int) -> tuple[Logprob, ...]:
    """The ``count`` most probable tokens that can be drawn at all; of equals the lowest ids."""
    if not count:
        return ()
    least = logprobs.topk(min(count, len(logprobs))).values[-1].clamp_min(-_LARGEST)
    above = (logprobs > least).nonzero()[:, 0]
    equal = (logprobs == least).nonzero()[: count - len(above), 0]
    ids = torch.cat((above, equal))
    pairs = sorted(zip((-logprobs[ids]).tolist(), ids.tolist(), strict=True))
    return tuple(Logprob(token, -value) for value, token in pairs)
