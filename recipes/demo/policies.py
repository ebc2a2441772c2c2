"""Exact simulation of token-level routing: both models see every committed prefix, a rule picks the writer.

No batching in flight and no processes are involved, so the figures are those of the algorithms alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recipes.demo import tasks
from recipes.demo.decoder import Decoder
from recipes.demo.scores import Outcome
from recipes.demo.tasks import Problem
from recipes.demo.tokenizer import EOS, MAX_NEW_TOKENS, decode, prompt_ids


@dataclass(frozen=True, slots=True)
class Step:
    """What a rule may look at, for every row of a batch, before a token is chosen.

    :param hidden: the small model's hidden states after the final norm, [n, H].
    :param small_logits: its raw logits, [n, V].
    :param small_tokens: its most probable tokens, [n].
    :param large_logits: the large model's raw logits, [n, V]; the small model's if it runs alone.
    :param large_tokens: its most probable tokens, [n].
    :param held: whether the large model holds the request since the last step, bool [n].
    """

    hidden: Tensor
    small_logits: Tensor
    small_tokens: Tensor
    large_logits: Tensor
    large_tokens: Tensor
    held: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows whose token the large model writes, and rows that it holds afterwards; both bool [n]."""

    large: Tensor
    held: Tensor


Rule = Callable[[Step], Choice]


def small_only(step: Step) -> Choice:
    """Never leave the small model."""
    nowhere = torch.zeros_like(step.held)
    return Choice(nowhere, nowhere)


def one_token(wanted: Callable[[Step], Tensor]) -> Rule:
    """Let the large model write exactly one token wherever ``wanted`` holds."""
    return lambda step: Choice(wanted(step), torch.zeros_like(step.held))


oracle = one_token(lambda step: step.small_tokens != step.large_tokens)
"""Ask only where the two differ: the least that a one-token rule must ask to get the large model's text."""


def r_stitch(tau: float) -> Rule:
    """R-Stitch (arXiv 2507.17307): hand over where the entropy exceeds ``tau``, else hand back."""

    def rule(step: Step) -> Choice:
        large = step.held | (normalised_entropy(step.small_logits) > tau)
        return Choice(large, large & (normalised_entropy(step.large_logits) > tau))

    return rule


def confidence_below(threshold: float) -> Rule:
    """Ask where the small model's largest probability is below ``threshold``."""
    return one_token(lambda step: step.small_logits.softmax(-1).amax(-1) < threshold)


def at_random(share: float, seed: int = 0) -> Rule:
    """Ask for this share of the tokens, drawn independently."""
    generator = torch.Generator().manual_seed(seed)
    return one_token(lambda step: torch.rand(step.held.shape, generator=generator) < share)


def normalised_entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax of logits [n, V] in units of ln V, in [0, 1] (arXiv 2507.17307, section 3)."""
    mean_logit = (logits.softmax(-1) * logits).sum(-1)
    return ((logits.logsumexp(-1) - mean_logit) / math.log(logits.shape[-1])).clamp(0, 1)


@dataclass(slots=True)
class Response:
    """One answer while it is written."""

    ids: list[int] = field(default_factory=list)
    large: int = 0
    handoffs: int = 0

    @property
    def text(self) -> str:
        return decode(self.ids)

    def outcome(self, problem: Problem) -> Outcome:
        """How the answer fared."""
        return Outcome(
            task=problem.task,
            correct=tasks.is_correct(self.text, problem.answer),
            exact=self.text == problem.answer,
            tokens=len(self.ids),
            large_tokens=self.large,
            handoffs=self.handoffs,
        )


@torch.no_grad()
def simulate(
    problems: Sequence[Problem],
    rule: Rule,
    small: Decoder,
    large: Decoder | None = None,
    *,
    batch: int = 125,
) -> list[Response]:
    """Answer every problem greedily; without ``large`` the small model runs alone."""
    by_length = sorted(
        range(len(problems)), key=lambda i: len(problems[i].question) + len(problems[i].answer)
    )
    responses = [Response() for _ in problems]
    for start in range(0, len(by_length), batch):
        rows = by_length[start : start + batch]
        _answer([problems[i] for i in rows], [responses[i] for i in rows], rule, small, large)
    return responses


def _answer(
    problems: list[Problem], responses: list[Response], rule: Rule, small: Decoder, large: Decoder | None
) -> None:
    prompts = [prompt_ids(problem.question) for problem in problems]
    length = max(map(len, prompts)) + MAX_NEW_TOKENS
    own = small.prefill(prompts, length)
    peer = large.prefill(prompts, length) if large else own
    positions = torch.tensor([len(prompt) for prompt in prompts])
    held = torch.zeros(len(prompts), dtype=torch.bool)
    open_ = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        small_tokens = _greedy(own.logits, small.defer_id)
        step = Step(own.hidden, own.logits, small_tokens, peer.logits, peer.logits.argmax(-1), held)
        choice = rule(step)
        tokens = torch.where(choice.large, step.large_tokens, small_tokens)
        arrivals = choice.large & ~held
        returns = choice.large & ~choice.held & (tokens != EOS)
        for row in open_.nonzero()[:, 0].tolist():
            response = responses[row]
            response.ids.append(int(tokens[row]))
            response.large += bool(choice.large[row])
            response.handoffs += int(arrivals[row]) + int(returns[row])
        held = choice.held
        open_ = open_ & (tokens != EOS)
        if not open_.any():
            return
        if open_.float().mean() < 0.8 or (len(open_) < 20 and not open_.all()):
            rest = open_.nonzero()[:, 0]
            small.keep(rest)
            if large:
                large.keep(rest)
            tokens, positions, held, open_ = tokens[rest], positions[rest], held[rest], open_[rest]
            responses = [responses[row] for row in rest.tolist()]
        own = small.extend(tokens, positions)
        peer = large.extend(tokens, positions) if large else own
        positions = positions + 1


def _greedy(logits: Tensor, never: int | None) -> Tensor:
    """The most probable tokens [n], never the id ``never``."""
    if never is None:
        return logits.argmax(-1)
    return logits.index_fill(-1, torch.tensor([never]), float("-inf")).argmax(-1)
