"""Rules of a recipe compiled to torch: which rule fires, for every row of a batch at once.

A rule's condition is a tree of plain data, ``[node, *arguments]``; :mod:`tokenflow.dsl.expr` lists the
nodes.  How it computes:

- Token ids, positions, run lengths and numbers without a fraction are *whole*: int64, compared exactly.
  ``draw`` is *double*: float64.  All else is *real*: float32.  Where numbers of several kinds meet, in a
  division, or where a whole result could leave the range of int64, whole becomes real, or double beside
  double; real becomes double beside double.
- ``x % y`` has the sign of ``y``; ``min`` and ``max`` keep the earlier of equal arguments, as in Python.
- Division by zero gives infinity or NaN (IEEE 754), and ``x % 0`` gives NaN, with which only ``!=`` holds.
- What contains no signal, parameter, score or text is computed once, in Python's numbers.
- Windows and momentums compute in float64 and give a real.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from tokenflow.errors import ProtocolError
from tokenflow.routing.heads.base import Head
from tokenflow.routing.memory import Memory
from tokenflow.routing.signals import Signals
from tokenflow.routing.terms import Malformed, Run
from tokenflow.routing.trees import Scope, compile_tree
from tokenflow.wire.messages import RouteRule


@dataclass(frozen=True, slots=True)
class Rules:
    """Compiled rules: called with the signals of B rows, they give the index of the first rule that fires
    in each row, or -1, as int64 [B].

    Nothing needs to be given that they do not read: ``signals``, ``params`` and ``heads`` are names (heads
    need hidden states), ``tail`` is how many tokens before the sampled one they look at, and ``state`` how
    many numbers they keep of each request from step to step.
    """

    signals: frozenset[str]
    params: frozenset[str]
    heads: frozenset[str]
    tail: int
    state: int
    choose: Run
    memories: tuple[Memory, ...]

    def __call__(self, signals: Signals) -> Tensor:
        return self.choose(signals)

    def advance(self, signals: Signals) -> Tensor:
        """The state after this step, float64 [B, ``state``]; each row's depends on that row alone."""
        if not self.memories:
            return torch.empty(len(signals.token), 0, dtype=torch.float64, device=signals.token.device)
        return torch.cat([memory.kept(signals) for memory in self.memories], 1)


def compile_rules(
    rules: Sequence[RouteRule], params: Collection[str], heads: Mapping[str, Head] = MappingProxyType({})
) -> Rules:
    """Compile a model's rules.

    :param params: the recipe's parameters.
    :param heads: the model's router heads by name.
    :raises ProtocolError: if a rule's condition is not a tree as above over ``params`` and ``heads``.
    :raises ModelLoadError: if a condition asks for the threshold of a head that has none.
    """
    conditions: list[tuple[int, Run]] = []
    reads: set[tuple[str, Any]] = set()
    scope = Scope(params, heads)
    otherwise = -1
    for index, rule in enumerate(rules):
        try:
            condition = compile_tree(rule.when, scope)
        except Malformed as error:
            raise ProtocolError(f"rule {index}: {error}") from None
        if condition.kind != "truth":
            raise ProtocolError(f"rule {index}: a number, not a condition")
        if condition.run is not None:
            conditions.append((index, condition.run))
            reads |= condition.reads
        elif condition.value:
            otherwise = index
            break
    memories = tuple(memory for memory in scope.memories.values() if ("memory", memory) in reads)
    ends = list(accumulate((memory.width for memory in memories), initial=0))
    for memory, start in zip(memories, ends[:-1], strict=True):
        memory.start = start
    return Rules(
        signals=_names(reads, "signal"),
        params=_names(reads, "param"),
        heads=_names(reads, "head"),
        tail=max((length for of, length in reads if of == "tail"), default=0),
        state=ends[-1],
        choose=_chooser(conditions, otherwise),
        memories=memories,
    )


def _names(reads: Collection[tuple[str, Any]], kind: str) -> frozenset[str]:
    return frozenset(name for of, name in reads if of == kind)


def _chooser(conditions: Sequence[tuple[int, Run]], otherwise: int) -> Run:
    if not conditions:
        return lambda signals: torch.full_like(signals.token, otherwise)

    def choose(signals: Signals) -> Tensor:
        chosen: Tensor | int = otherwise
        for index, run in reversed(conditions):
            chosen = torch.where(run(signals), index, chosen)
        return cast(Tensor, chosen)

    return choose
