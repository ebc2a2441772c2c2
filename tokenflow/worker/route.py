"""Where requests go after a step: the rules or the Python route of a model, with its router heads.

Called with the rows that got a token; every per-token fact comes from the row's own resident.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenflow.engines.base import Engine
from tokenflow.errors import ModelLoadError
from tokenflow.random import DRAW, uniform
from tokenflow.routing.heads import Comparison, Head, find_defer_id, load_head
from tokenflow.routing.python import PythonRoute
from tokenflow.routing.rules import compile_rules
from tokenflow.routing.signals import Signals, column, computed
from tokenflow.wire.messages import Hello, Row
from tokenflow.worker.residents import Resident


@dataclass(frozen=True, slots=True)
class Decision:
    """Which rule fired (-1 for none), and the destination code (0 to stay)."""

    rule: int
    destination: int


_STAY = Decision(-1, 0)


class Route:
    """The compiled routing of one model: its rules, or its route in Python.

    ``excluded`` are ids that are no words of the vocabulary (a deferral row): never sampled, and outside
    every softmax.

    :raises ModelLoadError: if a head or a Python route cannot be loaded.
    """

    def __init__(self, hello: Hello, engine: Engine) -> None:
        heads = load_heads(hello, engine)
        defer = find_defer_id(Path(hello.config.path))
        ids = {token for head in heads.values() for token in head.excluded}
        self.excluded = tuple(sorted(ids if defer is None else ids | {defer}))
        self._excluded = torch.tensor(self.excluded, device=engine.info.device) if self.excluded else None
        self._params = hello.params
        self._rules = compile_rules(hello.rules, hello.params, heads)
        self._by_rule = [*(Decision(i, rule.destination) for i, rule in enumerate(hello.rules)), _STAY]
        self._python = (
            PythonRoute(hello.python, hello.model, hello.code, hello.models, hello.params, heads)
            if hello.python is not None
            else None
        )
        self._looking_back = self._rules if self._python is None else self._python

    def __call__(
        self, rows: Sequence[tuple[Row, Resident]], tokens: Sequence[int], logits: Tensor, hidden: Tensor
    ) -> list[Decision]:
        """Decide for each row, which has just got its token.

        :param logits: raw, float32 [B, V].
        :param hidden: after the final norm, [B, H].
        :raises RouteFailed: if a route in Python fails.
        """
        if self._python is None and len(self._by_rule) == 1:
            return [_STAY] * len(rows)
        memories = self._looking_back.memories
        signals = StepSignals(
            rows,
            tokens,
            logits,
            hidden,
            self._excluded,
            self._params,
            self._looking_back.tail,
            memories.width,
        )
        if self._python is not None:
            values = [resident.settings.params for _, resident in rows]
            decisions = [Decision(-1, code) for code in self._python(signals, values)]
        else:
            decisions = [self._by_rule[rule] for rule in self._rules(signals)]
        if memories.width:
            for (_, resident), state in zip(rows, memories.kept(signals), strict=True):
                resident.state = state
        return decisions


class StepSignals(Signals):
    """The signals of a step's rows: what is known of them becomes a tensor once it is asked for.

    :param tail: how many tokens before the sampled one are looked at.
    :param width: how many numbers are kept of each request from step to step.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Row, Resident]],
        tokens: Sequence[int],
        logits: Tensor,
        hidden: Tensor,
        excluded: Tensor | None,
        params: Sequence[str],
        tail: int,
        width: int,
    ) -> None:
        super().__init__(logits, excluded=excluded, hidden=hidden)
        self._rows = rows
        self._sampled = tokens
        self._names = params
        self._tail = tail
        self._width = width

    @property
    def names(self) -> Collection[str]:
        return self._names

    def param(self, name: str) -> Tensor:
        index = self._names.index(name)

        def values() -> Tensor:
            given = [resident.settings.params[index] for _, resident in self._rows]
            return column(given, np.float32, self.device)

        return self.once(("param", name), values)

    @property
    @computed
    def token(self) -> Tensor:
        return column(self._sampled, np.int64, self.device)

    @property
    @computed
    def position(self) -> Tensor:
        return self._column(lambda row, resident: resident.position, np.int64)

    @property
    @computed
    def run_length(self) -> Tensor:
        return self._column(lambda row, resident: row.run_length + 1, np.int64)

    @property
    @computed
    def draw(self) -> Tensor:
        return self._column(lambda row, resident: draw(resident), np.float64)

    @property
    @computed
    def tails(self) -> Tensor:
        return self._column(lambda row, resident: resident.tail(self._tail), np.int64)

    @property
    @computed
    def state(self) -> Sequence[list[float]]:
        blank = [0.0] * self._width
        return [resident.state or blank for _, resident in self._rows]

    def _column(self, of: Callable[[Row, Resident], object], dtype: type[np.generic]) -> Tensor:
        return column([of(row, resident) for row, resident in self._rows], dtype, self.device)


@dataclass(frozen=True, slots=True)
class Rethresholded:
    """A head whose threshold the recipe sets."""

    head: Head
    threshold: float | None

    @property
    def excluded(self) -> tuple[int, ...]:
        """See :class:`tokenflow.routing.heads.Head`."""
        return self.head.excluded

    @property
    def comparison(self) -> Comparison:
        """See :class:`tokenflow.routing.heads.Head`."""
        return self.head.comparison

    def score(self, hidden: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        """See :class:`tokenflow.routing.heads.Head`."""
        return self.head.score(hidden, tokens, logits)


def load_heads(hello: Hello, engine: Engine) -> dict[str, Head]:
    """The router heads that a model's routing reads; a threshold of the recipe replaces the stored one."""
    heads: dict[str, Head] = {}
    for spec in hello.heads:
        try:
            head = load_head(
                spec.kind,
                Path(spec.path or hello.config.path),
                embeddings=engine.embeddings,
                hidden_size=engine.info.hidden_size,
                device=torch.device(engine.info.device),
                dtype=getattr(torch, spec.dtype),
            )
        except ModelLoadError as error:
            raise type(error)(f"head {spec.name!r} ({spec.where}): {error}") from error
        heads[spec.name] = head if spec.threshold is None else Rethresholded(head, spec.threshold)
    return heads


def draw(resident: Resident) -> float:
    """The random number of the position after the sampled token."""
    opened = resident.settings
    return uniform(opened.seed, opened.sampling.choice, resident.position + 1, 0, DRAW)
