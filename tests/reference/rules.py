"""Routing algorithms as plain Python over one step of one request.

Each is written out from its paper or its authors' code, without anything of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference.reference import Decision, Rule, Step, drop_and_go_to, keep_and_go_to, stay

TOP_LOGITS = 100


def entropy_nats(logits: Tensor) -> float:
    """Entropy of softmax(logits) in nats, computed in float32.

    An impossible token (logit -inf, or a probability that underflows) adds nothing.
    """
    z = logits.float()
    p = z.softmax(-1)
    return float((z.logsumexp(-1) - torch.where(p > 0, p * z, 0.0).sum()).clamp_min(0))


def entropy(logits: Tensor) -> float:
    """Entropy over the full width V, divided by ln V: in [0, 1]."""
    return min(entropy_nats(logits) / math.log(len(logits)), 1.0)


def confidence(logits: Tensor) -> float:
    """The largest probability."""
    return float(logits.softmax(-1).max())


def margin(logits: Tensor) -> float:
    """The largest probability minus the second largest."""
    first, second = logits.softmax(-1).topk(2).values
    return float(first - second)


def aleatoric(logits: Tensor) -> float:
    """Aleatoric uncertainty of LogU, as R2R's code has it: the ten largest raw logits are evidence.

    Evidence is not negative, so what is below 0 counts as 0.
    """
    evidence = logits.topk(10).values.clamp_min(0).double()
    total = evidence.sum()
    return float(-(evidence / total * (torch.digamma(evidence + 1) - torch.digamma(total + 1))).sum())


class Verdict(NamedTuple):
    """Whether the large model is wanted, and how close that was."""

    wanted: bool
    gap: float


Wanted = Callable[[Step], Verdict]


@dataclass(frozen=True)
class Below:
    """Where a signal of the logits is below a threshold."""

    signal: Callable[[Tensor], float] = field(repr=False)
    threshold: float

    def __call__(self, step: Step) -> Verdict:
        value = self.signal(step.logits)
        return Verdict(value < self.threshold, abs(value - self.threshold))


@dataclass(frozen=True)
class Reaching:
    """Where a signal of the logits reaches a threshold."""

    signal: Callable[[Tensor], float] = field(repr=False)
    threshold: float

    def __call__(self, step: Step) -> Verdict:
        value = self.signal(step.logits)
        return Verdict(value >= self.threshold, abs(value - self.threshold))


@dataclass(frozen=True)
class R2R:
    """R2R (arXiv 2505.21600): a network over hidden state, sampled token and largest logits.

    ``latest`` steps' probabilities are averaged; the published rule looks at one.
    """

    head: Callable[[Tensor, Tensor, Tensor], Tensor] = field(repr=False)
    threshold: float
    latest: int = 1

    @torch.no_grad()
    def _score(self, step: Step) -> float:
        best = step.logits.topk(TOP_LOGITS).values
        return float(self.head(step.hidden[None], torch.tensor([step.token]), best[None]).sigmoid())

    def __call__(self, step: Step) -> Verdict:
        value = mean([self._score(each) for each in latest(step, self.latest)])
        return Verdict(value >= self.threshold, abs(value - self.threshold))


@dataclass(frozen=True)
class Citer:
    """CITER (arXiv 2502.01976): a network over the hidden state gives the probability of a good token."""

    head: Callable[[Tensor], Tensor] = field(repr=False)
    tau: float

    @torch.no_grad()
    def __call__(self, step: Step) -> Verdict:
        value = float(self.head(step.hidden[None]))
        return Verdict(value < self.tau, abs(value - self.tau))


@dataclass(frozen=True)
class CoLLM:
    """Co-LLM (arXiv 2403.03870): the sigmoid of the raw logit of the deferral token."""

    defer_id: int
    eta: float

    def __call__(self, step: Step) -> Verdict:
        value = float(step.logits[self.defer_id].sigmoid())
        return Verdict(value > self.eta, abs(value - self.eta))


@dataclass(frozen=True)
class Chance:
    """A share of the tokens, by the request's random numbers."""

    q: float

    def __call__(self, step: Step) -> Verdict:
        return Verdict(step.draw < self.q, math.inf)


@dataclass(frozen=True)
class Momentum:
    """R2R's strategy "momentum" with entropy: an average of how certain the steps were, with hysteresis."""

    h: float
    low: float
    high: float

    def __call__(self, step: Step) -> Verdict:
        average, gaps = 0.0, []
        for each in (*step.earlier, step):
            nats = entropy_nats(each.logits)
            average = 0.7 * average + (0.3 if nats < self.h else 0.0)
            gaps.append(abs(nats - self.h))
        bound = self.high if after_large(step) else self.low
        return Verdict(average <= bound, min(abs(average - bound), *gaps))


@dataclass(frozen=True)
class Rolling:
    """R2R's strategy "rolling" with entropy: an uncertain token, then as long as the last three are."""

    h: float

    def __call__(self, step: Step) -> Verdict:
        steps = latest(step, 3) if after_large(step) else [step]
        value = mean([entropy_nats(each.logits) for each in steps])
        return Verdict(value >= self.h, abs(value - self.h))


def latest(step: Step, count: int) -> list[Step]:
    """The last ``count`` steps of the request at the model, this one included; fewer at first."""
    return [*step.earlier, step][-count:]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def after_large(step: Step) -> bool:
    """Whether another model wrote the token before this one."""
    return bool(step.writers) and step.writers[-1] != step.model


@dataclass(frozen=True)
class Alone:
    """One model writes everything."""

    entry: str

    def first(self, draw: float) -> str:
        return self.entry

    def decide(self, step: Step) -> Decision:
        return stay()


@dataclass(frozen=True)
class Deferral:
    """Where the small model wants it, the large one writes ``n`` tokens, that one first."""

    wanted: Wanted
    n: int = 1
    slm: str = "slm"
    llm: str = "llm"

    def first(self, draw: float) -> str:
        return self.slm

    def decide(self, step: Step) -> Decision:
        if step.model == self.slm:
            wanted, gap = self.wanted(step)
            return drop_and_go_to(self.llm, gap) if wanted else stay(gap)
        return keep_and_go_to(self.slm) if step.run_length >= self.n else stay()


@dataclass(frozen=True)
class RStitch:
    """R-Stitch (arXiv 2507.17307, section 3): the small model's uncertain tokens are rewritten by the large
    one, which writes until it is certain."""

    tau: float
    slm: str = "slm"
    llm: str = "llm"

    def first(self, draw: float) -> str:
        return self.slm

    def decide(self, step: Step) -> Decision:
        signal = entropy(step.logits)
        gap = abs(signal - self.tau)
        if step.model == self.slm:
            return drop_and_go_to(self.llm, gap) if signal > self.tau else stay(gap)
        return keep_and_go_to(self.slm, gap) if signal <= self.tau else stay(gap)


@dataclass(frozen=True)
class Ensemble:
    """ME (arXiv 2605.00419): every token's writer is drawn by weight, the first one's too."""

    weights: Mapping[str, float]

    def first(self, draw: float) -> str:
        ends = accumulate(self.weights.values())
        point = draw * sum(self.weights.values())
        return next(name for name, end in zip(self.weights, ends, strict=True) if point < end)

    def decide(self, step: Step) -> Decision:
        to = self.first(step.draw)
        return stay() if to == step.model else keep_and_go_to(to)


@dataclass(frozen=True)
class Cascade:
    """Three models; the more uncertain a token, the larger the model that writes it."""

    low: float
    high: float

    def first(self, draw: float) -> str:
        return "slm"

    def decide(self, step: Step) -> Decision:
        signal = entropy(step.logits)
        gap = min(abs(signal - self.low), abs(signal - self.high))
        wanted = "llm" if signal > self.high else "mid" if signal > self.low else "slm"
        order = ["slm", "mid", "llm"]
        if wanted == step.model:
            return stay(gap)
        larger = order.index(wanted) > order.index(step.model)
        return drop_and_go_to(wanted, gap) if larger else keep_and_go_to(wanted, gap)


@dataclass(frozen=True)
class Turns:
    """Every model writes so many tokens, then the next one goes on."""

    lengths: Mapping[str, int]

    def first(self, draw: float) -> str:
        return next(iter(self.lengths))

    def decide(self, step: Step) -> Decision:
        names = list(self.lengths)
        if step.run_length < self.lengths[step.model]:
            return stay()
        return keep_and_go_to(names[(names.index(step.model) + 1) % len(names)])


@dataclass(frozen=True)
class ThinkAnswer:
    """The large model writes until a tag, the small one the rest."""

    tag: tuple[int, ...]

    def first(self, draw: float) -> str:
        return "llm"

    def decide(self, step: Step) -> Decision:
        return keep_and_go_to("slm") if step.model == "llm" and ends_in(step, self.tag) else stay()


@dataclass(frozen=True)
class StepBoundary:
    """Routing by steps (GlimpRouter, arXiv 2601.05110): the large model writes a step whose first token is
    uncertain; it also writes what begins the answer, and then the answer."""

    h: float
    delimiter: tuple[int, ...]
    answer: tuple[int, ...]
    longest: int

    def first(self, draw: float) -> str:
        return "slm"

    def decide(self, step: Step) -> Decision:
        if step.model == "slm":
            gap = math.inf
            if not step.output or step.output[-len(self.delimiter) :] == self.delimiter:
                nats = entropy_nats(step.logits)
                gap = abs(nats - self.h)
                if nats >= self.h:
                    return drop_and_go_to("llm", gap)
            return drop_and_go_to("llm", gap) if ends_in(step, self.answer) else stay(gap)
        if any(ends_in(each, self.answer) for each in (*step.earlier, step)):
            return stay()
        over = ends_in(step, self.delimiter) or step.run_length >= self.longest
        return keep_and_go_to("slm") if over else stay()


@dataclass(frozen=True)
class TagCall:
    """The small model calls with a tag; the large one writes the next ``n`` tokens (RelayLLM,
    arXiv 2601.05167)."""

    tag: tuple[int, ...]
    n: int

    def first(self, draw: float) -> str:
        return "slm"

    def decide(self, step: Step) -> Decision:
        if step.model == "slm":
            return keep_and_go_to("llm") if ends_in(step, self.tag) else stay()
        return keep_and_go_to("slm") if step.run_length >= self.n else stay()


def ends_in(step: Step, ids: tuple[int, ...]) -> bool:
    """Whether the output, the sampled token included, ends in these ids."""
    return (*step.output, step.token)[-len(ids) :] == ids


@dataclass(frozen=True)
class Budgeted:
    """A rule within the budget of one model: a share of the tokens so far, a number of tokens."""

    rule: Rule
    model: str = "llm"
    share: float = 1.0
    tokens: int | float = math.inf

    def first(self, draw: float) -> str:
        return self.rule.first(draw)

    def decide(self, step: Step) -> Decision:
        decision = self.rule.decide(step)
        written, length = step.writers.count(self.model), len(step.output)
        if decision.to == self.model and not self._allows(written, length):
            decision = stay(decision.gap)
        if step.model == self.model and decision.to is None and not self._allows(written + 1, length + 1):
            return keep_and_go_to(self.first(step.draw), decision.gap)
        return decision

    def _allows(self, written: int, length: int) -> bool:
        """Whether the model may write one more token of a response of ``length`` tokens."""
        return written + 1 <= self.tokens and written + 1 <= Decimal(str(self.share)) * (length + 1)
