"""Routes written in Python: what they see of a step, and what is made of their answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from tokenflow.errors import ModelLoadError, RouteFailed
from tokenflow.routing.heads.base import Head
from tokenflow.routing.rules import Named, compile_named
from tokenflow.routing.signals import Signals
from tokenflow.wire.code import ImportFailed, failure, find, keywords, place
from tokenflow.wire.messages import PythonSpec

TAIL = 16
"""How many output tokens before the sampled one a route can look at."""

_NONE = compile_named({}, ())
_FLOOR = 75.0
"""How far below the largest of its row a logit may lie: exp(-75) is about 2.7e-33, so that probabilities over
up to 200,000 words are normal float32 numbers and p ln p is finite."""
_MOST_ROUTERS = 256
"""Objects of a class that are kept, one for each set of parameter values; older ones are made anew."""
_SHOWN = 80


class LogitsOutput:
    """The forward pass of a step for B requests."""

    def __init__(self, signals: Signals, rows: Tensor | None) -> None:
        self._signals = signals
        self._rows = rows

    @cached_property
    def next_token_logits(self) -> Tensor:
        """Raw logits, before penalties and temperature, float32 [B, V].

        None lies more than 75 below the largest of its row, so that every probability is above 0.
        """
        logits = _take(self._signals.logits(), self._rows)
        return torch.maximum(logits, logits.amax(-1, keepdim=True) - _FLOOR)

    @property
    def hidden_states(self) -> Tensor:
        """Hidden states of the last layer after the final norm, in the engine's dtype, [B, H]."""
        return _take(self._signals.hidden, self._rows)


class Result:
    """What a step gave for B requests.

    :param signals: of a batch.
    :param heads: the router heads that the route reads.
    :param rows: the B rows of the batch that are meant, int64 [B]; None for all.
    :param named: the expressions that are declared with the model.
    """

    def __init__(
        self,
        signals: Signals,
        heads: Mapping[str, Head] = MappingProxyType({}),
        rows: Tensor | None = None,
        named: Named = _NONE,
    ) -> None:
        self.logits_output = LogitsOutput(signals, rows)
        self._signals = signals
        self._heads = heads
        self._named = named
        self._rows = rows

    @property
    def next_token_ids(self) -> Tensor:
        """The ids just sampled, int64 [B]."""
        return _take(self._signals.token, self._rows)

    @property
    def tails(self) -> Tensor:
        """Output ids before the one just sampled, the latest last, -1 where there are none, int64 [B, 16]."""
        return _take(self._signals.tails[:, -TAIL:], self._rows)

    @property
    def position(self) -> Tensor:
        """Index of the sampled token in the output, from 0, int64 [B]."""
        return _take(self._signals.position, self._rows)

    @property
    def run_length(self) -> Tensor:
        """Tokens committed by this model since the request came, the sampled one included, int64 [B]."""
        return _take(self._signals.run_length, self._rows)

    @property
    def draw(self) -> Tensor:
        """Uniform in [0, 1) for the position after the sampled token, whichever model asks, float64 [B]."""
        return _take(self._signals.draw, self._rows)

    @cached_property
    def params(self) -> Mapping[str, Tensor]:
        """The recipe's parameters, each float32 [B]."""
        return {name: _take(self._signals.param(name), self._rows) for name in self._signals.names}

    def entropy(self) -> Tensor:
        """Entropy of the next-token distribution over ln V, in [0, 1], float32 [B]."""
        return _take(self._signals.entropy(), self._rows)

    def entropy_nats(self) -> Tensor:
        """Entropy of the next-token distribution in nats, float32 [B]."""
        return _take(self._signals.entropy_nats(), self._rows)

    def confidence(self) -> Tensor:
        """The largest probability, float32 [B]."""
        return _take(self._signals.confidence(), self._rows)

    def margin(self) -> Tensor:
        """The largest probability minus the second largest, float32 [B]."""
        return _take(self._signals.margin(), self._rows)

    def logprob(self) -> Tensor:
        """Log-probability of the sampled token in nats, float32 [B]."""
        return _take(self._signals.logprob(), self._rows)

    def signal(self, name: str) -> Tensor:
        """An expression declared with the model, as in ``signals={"smooth": "momentum(entropy, 0.9)"}``.

        :return: [B]: bool for a condition, int64 where all in it is whole, float64 where ``draw`` is in it,
            else float32.
        :raises LookupError: if the model declares none of this name.
        """
        if name not in self._named.terms:
            raise LookupError(f"no signal {name!r} here: declare it with recipe.model(..., signals={{...}})")
        return _take(self._named.value(name, self._signals), self._rows)

    def head(self, name: str) -> Tensor:
        """Score of a router head for the sampled token, float32 [B].

        :raises LookupError: if the model does not name the head in the recipe.
        """
        head, signals = self._head(name), self._signals
        score = signals.once(
            ("head", name), lambda: head.score(signals.hidden, signals.token, signals.raw).float()
        )
        return _take(score, self._rows)

    def threshold(self, name: str) -> float:
        """Threshold of a router head: the recipe's, else the one stored with the head.

        :raises LookupError: if the model does not name the head in the recipe, or it has no threshold.
        """
        threshold = self._head(name).threshold
        if threshold is None:
            raise LookupError(f"head {name!r} comes without a threshold: give one in the recipe")
        return threshold

    def _head(self, name: str) -> Head:
        if name not in self._heads:
            raise LookupError(f"no head {name!r} here: name it with recipe.model(..., heads=[...])")
        return self._heads[name]


class PythonRoute:
    """A model's route function, or the ``route`` of its class, over a batch.

    ``tail`` is how many tokens before the sampled one it can look at, and ``memories`` what the expressions
    declared with the model keep of each request from step to step.

    :param spec: what to import.
    :param model: the model's name, for messages.
    :param code: its destination code.
    :param models: how many destination codes there are, from 1.
    :param params: names of the recipe's parameters.
    :param heads: the router heads that the route reads.
    :raises ModelLoadError: if the definition cannot be imported, or an expression asks for the threshold of
        a head that has none.
    """

    def __init__(
        self,
        spec: PythonSpec,
        model: str,
        code: int,
        models: int,
        params: Sequence[str],
        heads: Mapping[str, Head] = MappingProxyType({}),
    ) -> None:
        self._file = spec.file
        self._code = code
        self._models = models
        self._heads = heads
        self._named = compile_named(spec.signals, params, heads)
        self.tail = max(TAIL, self._named.tail)
        self.memories = self._named.memories
        try:
            definition = find(spec.file, spec.route or spec.router, spec.text)
        except ImportFailed as error:
            raise ModelLoadError(f"the route of model {model!r} cannot be imported: {error}") from error
        self._by_class = not spec.route
        self._route: Callable[..., object] = definition.route if self._by_class else definition
        self._name = f"route of model {model!r} ({place(self._route)})"
        self._asked = () if self._by_class else keywords(definition, [*params, *spec.signals])

        @lru_cache(_MOST_ROUTERS)
        def build(values: tuple[float, ...]) -> Any:
            attributes = dict(zip(params, values, strict=True))
            return definition.build(index=code, peer_idx=spec.peer or None, params=attributes)

        self._build = build

    def __call__(self, signals: Signals, values: Sequence[tuple[float, ...]]) -> list[int]:
        """The destination code of each row; 0 to stay.

        :param signals: of B rows, complete: positions, run lengths, draws, hidden states, every parameter,
            tails of ``tail`` tokens and states.
        :param values: each row's parameter values in the order of ``params``; B of them.
        :raises RouteFailed: if the route raises, or its answer is not one code for each row.
        """
        if not self._by_class:
            result = Result(signals, self._heads, named=self._named)
            asked = {
                name: result.signal(name) if name in self._named.terms else signals.param(name)
                for name in self._asked
            }
            return self._ask(len(values), self._route, result, **asked)
        groups: dict[tuple[float, ...], list[int]] = {}
        for row, own in enumerate(values):
            groups.setdefault(own, []).append(row)
        codes = [0] * len(values)
        for own, rows in groups.items():
            chosen = torch.tensor(rows, device=signals.token.device) if len(groups) > 1 else None
            result = Result(signals, self._heads, chosen, self._named)
            for row, code in zip(rows, self._ask(len(rows), self._route_with, own, result), strict=True):
                codes[row] = code
        return codes

    def _route_with(self, values: tuple[float, ...], result: Result) -> object:
        return self._build(values).route(result)

    def _ask(self, count: int, call: Callable[..., object], /, *given: object, **params: Tensor) -> list[int]:
        try:
            answer = call(*given, **params)
        except BaseException as error:  # nobody interrupts a worker: it is the route that says so
            raise RouteFailed(f"{self._name} {failure(error, self._file)}") from error
        codes = self._plain(answer, count)
        for row, code in enumerate(codes):
            if not 0 <= code <= self._models:
                self._fail(f"returned {code} for row {row}: destination codes are 0 (stay) to {self._models}")
        return [0 if code == self._code else code for code in codes]

    def _plain(self, answer: object, count: int) -> list[int]:
        """The answer as a list of whole numbers."""
        needed = f"a batch of {count} needs as many whole numbers"
        if isinstance(answer, Tensor):
            if answer.is_floating_point() or answer.is_complex() or answer.dtype == torch.bool:
                self._fail(f"returned {_shown(answer)}: {needed}, as from torch.where(condition, index, 0)")
            if answer.shape != (count,):
                self._fail(f"returned a tensor of shape {list(answer.shape)}: {needed}")
            try:
                codes: list[int] = answer.tolist()
            except Exception:  # one without values, or that keeps them in a way of its own
                kind = f"{answer.dtype}, {answer.layout}, on {answer.device}"
                self._fail(f"returned a tensor that cannot be listed ({kind}): {needed}, in a dense tensor")
            return codes
        if not isinstance(answer, list | tuple):
            self._fail(f"returned {_shown(answer)}: {needed}, in a tensor or a list")
        if len(answer) != count:
            self._fail(f"returned a list of {len(answer)}: {needed}")
        for row, code in enumerate(answer):
            if type(code) is not int:
                self._fail(f"returned {_shown(code)} for row {row}: {needed}")
        return list(answer)

    def _fail(self, what: str) -> NoReturn:
        raise RouteFailed(f"{self._name} {what}")


def _take(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]


def _shown(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # it cannot even be shown
        return type(value).__name__
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
