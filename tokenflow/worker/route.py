"""Where requests go after a step: the rules or the Python route of a model, with its router heads.

Called with the rows that got a token; every per-token fact comes from the row's own resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenflow.engines.base import Engine
from tokenflow.random import uniform
from tokenflow.routing.heads import Head, find_defer_id, load_head
from tokenflow.routing.rules import compile_rules
from tokenflow.routing.signals import Signals
from tokenflow.wire.messages import Hello, Row
from tokenflow.worker.residents import Resident

DRAW = "draw"
"""Purpose of the random number that rules see: one per output position, whichever model asks."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which rule fired (-1 for none), and the destination code (0 to stay)."""

    rule: int
    destination: int


class Route:
    """The compiled routing of one model.

    ``excluded`` are ids that are no words of the vocabulary (a deferral row): never sampled, and outside
    every softmax.
    """

    def __init__(self, hello: Hello, engine: Engine) -> None:
        self._hello = hello
        self._heads = {
            head.name: load_head(
                head.kind,
                Path(head.path or hello.config.path),
                embeddings=engine.embeddings,
                hidden_size=engine.info.hidden_size,
                device=torch.device(engine.info.device),
            )
            for head in hello.heads
        }
        defer = find_defer_id(Path(hello.config.path))
        ids = {id for head in self._heads.values() for id in head.excluded} | ({defer} - {None})
        self.excluded = tuple(sorted(ids))
        self._excluded = torch.tensor(self.excluded, device=engine.info.device) if self.excluded else None
        self._rules = compile_rules(hello.rules, hello.params, self._heads)

    def __call__(
        self,
        rows: Sequence[tuple[Row, Resident]],
        tokens: Sequence[int],
        logits: Tensor,
        hidden: Tensor,
    ) -> list[Decision]:
        """Decide for each row, which has just got its token; ``logits`` [B, V] are raw, ``hidden`` is [B, H]."""
        if not self._hello.rules:
            return [Decision(-1, 0)] * len(rows)
        signals = self._signals([resident for _, resident in rows], rows, tokens, logits, hidden)
        fired: list[int] = self._rules(signals).tolist()
        if self._rules.state:
            for (_, resident), state in zip(rows, self._rules.advance(signals).tolist(), strict=True):
                resident.state = state
        return [Decision(rule, self._hello.rules[rule].destination if rule >= 0 else 0) for rule in fired]

    def _signals(
        self,
        residents: Sequence[Resident],
        rows: Sequence[tuple[Row, Resident]],
        tokens: Sequence[int],
        logits: Tensor,
        hidden: Tensor,
    ) -> Signals:
        """What the rules read, and nothing else."""
        rules, device = self._rules, logits.device
        needs = rules.signals

        def column(values: Sequence[object], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        params = {}
        if rules.params:
            values = column([resident.settings.params for resident in residents], torch.float32)
            params = {name: values[:, index] for index, name in enumerate(self._hello.params)}
        blank = [0.0] * rules.state
        return Signals(
            logits=logits,
            tokens=column(tokens, torch.int64),
            positions=column([resident.position for resident in residents], torch.int64)
            if "position" in needs
            else None,
            run_lengths=column([row.run_length + 1 for row, _ in rows], torch.int64)
            if "run_length" in needs
            else None,
            params=params,
            excluded=self._excluded,
            draws=column([draw(resident) for resident in residents], torch.float64)
            if "draw" in needs
            else None,
            hidden=hidden if rules.heads else None,
            tails=column([resident.tail(rules.tail) for resident in residents], torch.int64)
            if rules.tail
            else None,
            state=column([resident.state or blank for resident in residents], torch.float64)
            if rules.state
            else None,
        )


def draw(resident: Resident) -> float:
    """The random number of the position after the sampled token."""
    opened = resident.settings
    return uniform(opened.seed, opened.sampling.choice, resident.position + 1, 0, DRAW)
