"""Where requests go after a step: the rules or the Python route of a model, with its router heads.

Called with the rows that got a token; every per-token fact comes from the row's own resident.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenflow.engines.base import Engine
from tokenflow.random import DRAW, uniform
from tokenflow.routing.heads import Comparison, Head, find_defer_id, load_head
from tokenflow.routing.python import TAIL, PythonRoute
from tokenflow.routing.rules import compile_rules
from tokenflow.routing.signals import Signals
from tokenflow.wire.messages import Hello, Row
from tokenflow.worker.residents import Resident


@dataclass(frozen=True, slots=True)
class Decision:
    """Which rule fired (-1 for none), and the destination code (0 to stay)."""

    rule: int
    destination: int


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
        self._destinations = [rule.destination for rule in hello.rules]
        self._rules = compile_rules(hello.rules, hello.params, heads)
        self._python = (
            PythonRoute(hello.python, hello.model, hello.code, hello.models, hello.params, heads)
            if hello.python is not None
            else None
        )

    def __call__(
        self, rows: Sequence[tuple[Row, Resident]], tokens: Sequence[int], logits: Tensor, hidden: Tensor
    ) -> list[Decision]:
        """Decide for each row, which has just got its token.

        :param logits: raw, float32 [B, V].
        :param hidden: after the final norm, [B, H].
        :raises RouteFailed: if a route in Python fails.
        """
        if self._python is None and not self._destinations:
            return [Decision(-1, 0)] * len(rows)
        signals = self._signals(rows, tokens, logits, hidden)
        if self._python is not None:
            values = [resident.settings.params for _, resident in rows]
            return [Decision(-1, code) for code in self._python(signals, values)]
        fired: list[int] = self._rules(signals).tolist()
        if self._rules.state:
            for (_, resident), state in zip(rows, self._rules.advance(signals).tolist(), strict=True):
                resident.state = state
        return [Decision(rule, self._destinations[rule] if rule >= 0 else 0) for rule in fired]

    def _signals(
        self, rows: Sequence[tuple[Row, Resident]], tokens: Sequence[int], logits: Tensor, hidden: Tensor
    ) -> Signals:
        """What the rules read and nothing else; everything for a route in Python."""
        rules, everything, device = self._rules, self._python is not None, logits.device
        residents = [resident for _, resident in rows]

        def column(values: Sequence[object], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def whole(values: Sequence[int]) -> Tensor:
            # Several times faster than torch.tensor, in every step of every model.
            return torch.frombuffer(array("q", values), dtype=torch.int64).to(device)

        def needed(name: str) -> bool:
            return everything or name in rules.signals

        tail = TAIL if everything else rules.tail
        params, blank = {}, [0.0] * rules.state
        if self._params and (everything or rules.params):
            values = column([resident.settings.params for resident in residents], torch.float32)
            params = {name: values[:, index] for index, name in enumerate(self._params)}
        positions = [resident.position for resident in residents] if needed("position") else None
        runs = [row.run_length + 1 for row, _ in rows] if needed("run_length") else None
        draws = [draw(resident) for resident in residents] if needed("draw") else None
        tails = [resident.tail(tail) for resident in residents] if tail else None
        states = [resident.state or blank for resident in residents] if rules.state else None
        return Signals(
            logits=logits,
            tokens=whole(tokens),
            positions=None if positions is None else whole(positions),
            run_lengths=None if runs is None else whole(runs),
            params=params,
            excluded=self._excluded,
            draws=None if draws is None else column(draws, torch.float64),
            hidden=hidden if everything or rules.heads else None,
            tails=None if tails is None else column(tails, torch.int64),
            state=None if states is None else column(states, torch.float64),
        )


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
        head = load_head(
            spec.kind,
            Path(spec.path or hello.config.path),
            embeddings=engine.embeddings,
            hidden_size=engine.info.hidden_size,
            device=torch.device(engine.info.device),
        )
        heads[spec.name] = head if spec.threshold is None else Rethresholded(head, spec.threshold)
    return heads


def draw(resident: Resident) -> float:
    """The random number of the position after the sampled token."""
    opened = resident.settings
    return uniform(opened.seed, opened.sampling.choice, resident.position + 1, 0, DRAW)
