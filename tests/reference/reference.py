"""The naive sequential reference of token-level routing.

One request at a time; at every step one model is run over the whole prefix, without any cache, and a plain
Python rule decides what becomes of its token.  It shares no code with the package: ``transformers`` runs the
models, and the signals are written out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

VERSION = 1
"""Rises when recorded traces of an older reference must not be used any more."""

NEAR_TIE = 1e-5
"""Two logits, or a signal and its threshold, that are closer than this may order either way."""

LastLogits = Callable[[Sequence[int]], Tensor]
"""A model: all token ids so far to the raw next-token logits, float32 [V]."""


class Step(NamedTuple):
    """What a rule sees after a model sampled a token.

    ``logits`` are raw, float32 [V].  ``position`` is the token's output index, from 0.  ``run_length`` counts
    the tokens committed by this model since the request came to it, ``token`` included.
    """

    model: str
    logits: Tensor
    token: int
    position: int
    run_length: int


class Decision(NamedTuple):
    """What becomes of a sampled token.

    ``to`` names the model that writes next, ``None`` is the same one.  A token that is not kept is written
    again by ``to``.  ``gap`` is how close the decision was: the distance of a signal to its threshold.
    """

    to: str | None
    keep: bool
    gap: float


def stay(gap: float = math.inf) -> Decision:
    """Commit the token and go on with the same model."""
    return Decision(None, True, gap)


def keep_and_go_to(model: str, gap: float = math.inf) -> Decision:
    """Commit the token; ``model`` writes the next one."""
    return Decision(model, True, gap)


def drop_and_go_to(model: str, gap: float = math.inf) -> Decision:
    """Discard the token; ``model`` writes this position."""
    return Decision(model, False, gap)


class Rule(Protocol):
    """A routing algorithm."""

    @property
    def entry(self) -> str:
        """The model that writes the first token."""

    def decide(self, step: Step) -> Decision:
        """What becomes of the token just sampled."""


@dataclass(frozen=True)
class Alone:
    """One model writes everything."""

    entry: str

    def decide(self, step: Step) -> Decision:
        return stay()


@dataclass(frozen=True)
class RStitch:
    """R-Stitch (arXiv 2507.17307, section 3): the small model's uncertain tokens are rewritten by the large
    one, which writes until it is certain."""

    tau: float
    slm: str = "slm"
    llm: str = "llm"

    @property
    def entry(self) -> str:
        return self.slm

    def decide(self, step: Step) -> Decision:
        signal = entropy(step.logits)
        gap = abs(signal - self.tau)
        if step.model == self.slm:
            return drop_and_go_to(self.llm, gap) if signal > self.tau else stay(gap)
        return keep_and_go_to(self.slm, gap) if signal <= self.tau else stay(gap)


def entropy(logits: Tensor) -> float:
    """Entropy of softmax(logits) over the full width V, divided by ln V: in [0, 1], computed in float32.

    An impossible token (logit -inf, or a probability that underflows) adds nothing.
    """
    z = logits.float()
    p = z.softmax(-1)
    expected = torch.where(p > 0, p * z, 0.0).sum()
    return float(((z.logsumexp(-1) - expected) / math.log(len(z))).clamp(0, 1))


class NearTie(NamedTuple):
    """A step that numerics may decide: two best tokens (``token``), or signal and threshold (``route``)."""

    position: int
    model: str
    kind: Literal["token", "route"]
    gap: float


@dataclass(frozen=True)
class Trace:
    """One response: its token ids, the model that wrote each, and where it might as well be another."""

    tokens: tuple[int, ...]
    models: tuple[str, ...]
    near_ties: tuple[NearTie, ...]
    finish_reason: Literal["stop", "length"]
    handoffs: int
    dropped: int


@dataclass(frozen=True)
class ReferenceModels:
    """The models of a recipe.

    Ids from ``vocab_limit`` on are never sampled; any id of ``eos`` ends a response.
    """

    models: Mapping[str, LastLogits]
    vocab_limit: int
    eos: frozenset[int]

    @classmethod
    def load(cls, paths: Mapping[str, Path]) -> ReferenceModels:
        """Load ``transformers`` models in float32; from then on torch uses one thread in this process."""
        torch.set_num_threads(1)
        networks = {name: _network(path) for name, path in paths.items()}
        eos: set[int] = set()
        for network in networks.values():
            ids = network.generation_config.eos_token_id
            eos.update(ids if isinstance(ids, list) else [ids])
        return cls(
            models={name: _last_logits(network) for name, network in networks.items()},
            vocab_limit=min(len(AutoTokenizer.from_pretrained(path)) for path in paths.values()),
            eos=frozenset(eos),
        )

    def run(self, rule: Rule, prompt_ids: Sequence[int], max_tokens: int) -> Trace:
        """Write one response, greedily.

        :raises RuntimeError: if a model gives up a position a second time: the rule would never end.
        """
        tokens: list[int] = []
        writers: list[str] = []
        near: list[NearTie] = []
        gave_up: set[str] = set()
        model, run_length, handoffs, dropped = rule.entry, 0, 0, 0
        while True:
            position = len(tokens)
            logits = self.models[model]([*prompt_ids, *tokens])
            best = logits[: self.vocab_limit].topk(2)
            token, margin = int(best.indices[0]), float(best.values[0] - best.values[1])
            decision = rule.decide(Step(model, logits, token, position, run_length + 1))
            if decision.gap < NEAR_TIE:
                near.append(NearTie(position, model, "route", decision.gap))
            if decision.keep:
                if margin < NEAR_TIE:
                    near.append(NearTie(position, model, "token", margin))
                tokens.append(token)
                writers.append(model)
                run_length += 1
                gave_up.clear()
                if token in self.eos or len(tokens) == max_tokens:
                    finish: Literal["stop", "length"] = "stop" if token in self.eos else "length"
                    return Trace(tuple(tokens), tuple(writers), tuple(near), finish, handoffs, dropped)
            else:
                dropped += 1
                if model in gave_up:
                    raise RuntimeError(f"{model} gave up position {position} twice")
                gave_up.add(model)
            if decision.to is not None:
                model, run_length = decision.to, 0
                handoffs += 1


@dataclass(frozen=True)
class Difference:
    """Where a response first departs from its reference.

    ``excuse`` is the near-tie, there or before, that allows it; ``None`` makes it an error.
    """

    position: int
    text: str
    excuse: NearTie | None


def difference(trace: Trace, tokens: Sequence[int], models: Sequence[str]) -> Difference | None:
    """The first position whose token or writer differs from the reference, if there is one."""
    expected = list(zip(trace.tokens, trace.models, strict=True))
    got = list(zip(tokens, models, strict=True))
    if expected == got:
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    text = (
        f"at output position {position} the reference has {_describe(expected, position)}, "
        f"this has {_describe(got, position)}"
    )
    excuse = next((tie for tie in trace.near_ties if tie.position <= position), None)
    return Difference(position, text, excuse)


def compare(trace: Trace, tokens: Sequence[int], models: Sequence[str]) -> str | None:
    """What is wrong with a response that should equal its reference; ``None`` if nothing is.

    From the first near-tie on, any difference is allowed.
    """
    found = difference(trace, tokens, models)
    return found.text if found is not None and found.excuse is None else None


def _describe(steps: list[tuple[int, str]], position: int) -> str:
    if position >= len(steps):
        return f"ended after {len(steps)} tokens"
    token, model = steps[position]
    return f"token {token} by {model}"


def _network(path: Path) -> Any:
    network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return network.eval()


def _last_logits(network: Any) -> LastLogits:
    @torch.inference_mode()
    def last_logits(ids: Sequence[int]) -> Tensor:
        output = network(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1)
        logits: Tensor = output.logits[0, -1]
        return logits

    return last_logits
