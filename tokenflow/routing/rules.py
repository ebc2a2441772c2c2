"""Rules of a recipe compiled to torch: which rule fires, for every row of a batch at once.

A rule's condition is a tree of plain data, ``[node, *arguments]``: ``number`` ``boolean`` ``signal``
``param``, arithmetic ``neg`` ``abs`` ``+`` ``-`` ``*`` ``/`` ``%`` ``min`` ``max``, comparisons, and
``and`` ``or`` ``not``.  How it computes:

- Token ids, positions, run lengths and numbers without a fraction are *whole*: int64, compared exactly.
  All else is *real*: float32.  Where the two meet, in a division, or where a whole result could leave
  the range of int64, whole numbers become real.
- ``x % y`` has the sign of ``y``; ``min`` and ``max`` keep the earlier of equal arguments, as in Python.
- Division by zero gives infinity or NaN (IEEE 754), and ``x % 0`` gives NaN, with which only ``!=`` holds.
- What contains neither a signal nor a parameter is computed once, in Python's numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tokenflow.errors import ProtocolError
from tokenflow.routing.signals import Signals
from tokenflow.routing.terms import Malformed, Run, compile_tree
from tokenflow.wire.messages import RouteRule


@dataclass(frozen=True, slots=True)
class Rules:
    """Compiled rules: called with the signals of B rows, they give the index of the first rule that fires
    in each row, or -1, as int64 [B].

    ``signals`` and ``params`` name what the rules read; nothing else needs to be given.
    """

    signals: frozenset[str]
    params: frozenset[str]
    choose: Run

    def __call__(self, signals: Signals) -> Tensor:
        return self.choose(signals)


def compile_rules(rules: Sequence[RouteRule], params: Collection[str]) -> Rules:
    """Compile a model's rules.

    :param params: the recipe's parameters.
    :raises ProtocolError: if a rule's condition is not a tree as above over ``params``.
    """
    conditions: list[tuple[int, Run]] = []
    reads: set[tuple[str, str]] = set()
    otherwise = -1
    for index, rule in enumerate(rules):
        try:
            condition = compile_tree(rule.when, params)
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
    signals, names = (frozenset(name for of, name in reads if of == kind) for kind in ("signal", "param"))
    return Rules(signals, names, _chooser(conditions, otherwise))


def _chooser(conditions: Sequence[tuple[int, Run]], otherwise: int) -> Run:
    if not conditions:
        return lambda signals: torch.full_like(signals.token, otherwise)

    def choose(signals: Signals) -> Tensor:
        chosen: Tensor | int = otherwise
        for index, run in reversed(conditions):
            chosen = torch.where(run(signals), index, chosen)
        return cast(Tensor, chosen)

    return choose
