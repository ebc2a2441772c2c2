"""The naive sequential reference of token-level routing.

One request at a time; at every step one model is run over the whole prefix, without any cache, and a plain
Python rule decides what becomes of its token.  It shares no code with the package but its random numbers:
``transformers`` runs the models, and signals and rules are written out again (:mod:`tests.reference.rules`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenflow.random import DRAW, uniform

VERSION = 1
"""Rises when recorded traces of an older reference must not be used any more."""

NEAR_TIE = 1e-5
"""Two logits, or a signal and its threshold, that are closer than this may order either way."""


class Output(NamedTuple):
    """The last position of a forward pass: raw logits, float32 [V], and hidden state after the final norm."""

    logits: Tensor
    hidden: Tensor


Model = Callable[[Sequence[int]], Output]
"""Runs over all token ids so far."""


@dataclass(frozen=True, eq=False)
class Step:
    """What a rule sees after a model sampled a token.

    ``logits`` are raw, float32 [V].  ``position`` is the token's output index, from 0.  ``run_length`` counts
    the tokens committed by this model since the request came to it, ``token`` included.  ``output`` and
    ``writers`` are the committed output before ``token``; ``earlier`` are the request's earlier steps at this
    model, those of dropped tokens included.  ``draw`` is the random number of the position after ``token``.
    """

    model: str
    logits: Tensor
    token: int
    position: int
    run_length: int
    hidden: Tensor = field(default_factory=lambda: torch.zeros(0))
    output: tuple[int, ...] = ()
    writers: tuple[str, ...] = ()
    earlier: tuple[Step, ...] = ()
    draw: float = 0.0


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

    def first(self, draw: float) -> str:
        """The model that writes the first token; ``draw`` is the random number of that position."""

    def decide(self, step: Step) -> Decision:
        """What becomes of the token just sampled."""


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
    """The models of a recipe, in its order.

    Ids from ``vocab_limit`` on are never sampled, nor are those that a model has in ``never``; any id of
    ``eos`` ends a response.
    """

    models: Mapping[str, Model]
    vocab_limit: int
    eos: frozenset[int]
    never: Mapping[str, frozenset[int]] = field(default_factory=dict)

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
            models={name: _model(network) for name, network in networks.items()},
            vocab_limit=min(len(AutoTokenizer.from_pretrained(path)) for path in paths.values()),
            eos=frozenset(eos),
            never={name: _never(path) for name, path in paths.items()},
        )

    def run(
        self,
        rule: Rule,
        prompt_ids: Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        temperature: float = 0.0,
    ) -> Trace:
        """Write one response; greedily at temperature 0.

        :raises RuntimeError: if a model is given a position that it gave up: the rule would never end.
        """
        tokens: list[int] = []
        writers: list[str] = []
        near: list[NearTie] = []
        earlier: dict[str, list[Step]] = {name: [] for name in self.models}
        gave_up: set[str] = set()
        model, run_length, handoffs, dropped = rule.first(uniform(seed, 0, 0, 0, DRAW)), 0, 0, 0
        while True:
            position = len(tokens)
            logits, hidden = self.models[model]([*prompt_ids, *tokens])
            if temperature:
                code = 1 + list(self.models).index(model)
                number = uniform(seed, 0, position, code, "token")
                token, margin = self.draw(model, logits, temperature, number)
            else:
                token, margin = self.best(model, logits)
            step = Step(
                model,
                logits,
                token,
                position,
                run_length + 1,
                hidden,
                tuple(tokens),
                tuple(writers),
                tuple(earlier[model]),
                uniform(seed, 0, position + 1, 0, DRAW),
            )
            earlier[model].append(step)
            decision = rule.decide(step)
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
                gave_up.add(model)
            if decision.to in gave_up:
                raise RuntimeError(f"{decision.to} is given position {position} again")
            if decision.to is not None:
                model, run_length = decision.to, 0
                handoffs += 1

    def speculate(self, prompt_ids: Sequence[int], max_tokens: int, draft: int, slm: str, llm: str) -> Trace:
        """Speculative decoding, greedily: ``slm`` drafts, ``llm`` checks and writes one token."""
        tokens: list[int] = []
        writers: list[str] = []
        near: list[NearTie] = []
        final, handoffs, dropped = 0, 0, 0

        def ask(model: str, position: int) -> int:
            token, margin = self.best(model, self.models[model]([*prompt_ids, *tokens[:position]]).logits)
            if margin < NEAR_TIE:
                near.append(NearTie(position, model, "token", margin))
            return token

        while True:
            for _ in range(draft):
                tokens.append(ask(slm, len(tokens)))
                writers.append(slm)
            handoffs += 1
            checked = final
            while (own := ask(llm, checked)) == (tokens[checked] if checked < len(tokens) else None):
                checked += 1
            dropped += len(tokens) - checked
            tokens[checked:], writers[checked:] = [own], [llm]
            for position in range(final, len(tokens)):
                stops = tokens[position] in self.eos
                if stops or position + 1 == max_tokens:
                    end = position + 1
                    return Trace(
                        tuple(tokens[:end]),
                        tuple(writers[:end]),
                        tuple(near),
                        "stop" if stops else "length",
                        handoffs,
                        dropped,
                    )
            final = len(tokens)
            handoffs += 1

    def best(self, model: str, logits: Tensor) -> tuple[int, float]:
        """The most probable token, and how far the next one is behind, in logits."""
        first = self._legal(model, logits).topk(2)
        return int(first.indices[0]), float(first.values[0] - first.values[1])

    def draw(self, model: str, logits: Tensor, temperature: float, number: float) -> tuple[int, float]:
        """The token at ``number`` in [0, 1) of the distribution, laid out in the order of the ids.

        Comes with how far the number is from where another token begins.
        """
        ends = (self._legal(model, logits).double() / temperature).softmax(-1).cumsum(-1)
        token = int((ends <= number).sum())
        begins = float(ends[token - 1]) if token else -math.inf
        return token, min(number - begins, float(ends[token]) - number)

    def _legal(self, model: str, logits: Tensor) -> Tensor:
        legal = logits[: self.vocab_limit].clone()
        legal[[token for token in self.never.get(model, ()) if token < self.vocab_limit]] = -math.inf
        return legal


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


def _model(network: Any) -> Model:
    @torch.inference_mode()
    def model(ids: Sequence[int]) -> Output:
        hidden = network.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
        return Output(network.lm_head(hidden), hidden)

    return model


def _never(path: Path) -> frozenset[int]:
    """The deferral token of a Co-LLM checkpoint is a signal and no text."""
    defer_id = json.loads((path / "config.json").read_text(encoding="utf-8")).get("defer_token_id")
    return frozenset() if defer_id is None else frozenset({defer_id})
