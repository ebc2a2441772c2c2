"""Rules of a recipe compiled to torch: which rule fires, for every row of a batch at once.

A rule's condition is a tree of plain data, ``[node, *arguments]``; :mod:`tokenflow.dsl.expr` lists the
nodes.  How it computes:

- Token ids, positions, run lengths and numbers without a fraction are *whole*: int64, compared exactly.
  ``draw`` is *double*: float64.  All else is *real*: float32.  Where numbers of several kinds meet, in a
  division, or where a whole result could leave the range of int64, whole becomes real, or double beside
  double; real becomes double beside double.
- ``x % y`` has the sign of ``y``; ``min`` and ``max`` keep the earlier of equal arguments, as in Python.
- What is too large for its kind is infinity, division by zero gives infinity or NaN (IEEE 754), and ``x % 0``
  gives NaN, with which only ``!=`` holds.  There is no other failure, and no warning.
- What contains no signal, parameter, score or text is computed once, with the same results.  A number or a
  threshold that stands alone, with or without a sign, is as exact as what it meets.
- Windows and momentums compute in float64 and give a real.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tokenflow.errors import ProtocolError
from tokenflow.routing.heads.base import Head
from tokenflow.routing.memory import Memories
from tokenflow.routing.signals import Signals
from tokenflow.routing.terms import Malformed, Run, Term
from tokenflow.routing.trees import Scope, compile_tree
from tokenflow.wire.messages import RouteRule


@dataclass(frozen=True, slots=True)
class Rules:
    """Compiled rules: called with the signals of B rows, they give the index of the first rule that fires
    in each row, or -1.

    ``conditions`` are those of the rules that may fire or not, with their indices, the last rule first;
    ``otherwise`` is the index of the rule after them that always fires, or -1.  ``tail`` is how many tokens
    before the sampled one they look at, and ``memories`` what they keep of each request from step to step.
    """

    conditions: tuple[tuple[int, Run], ...]
    otherwise: int
    tail: int
    memories: Memories

    def __call__(self, signals: Signals) -> list[int]:
        held = [run(signals) for _, run in self.conditions]
        if not held:
            return [self.otherwise] * signals.batch
        # One copy from the device for all of them.
        flags = torch.stack(held).tolist() if len(held) > 1 else [held[0].tolist()]
        chosen = [self.otherwise] * len(flags[0])
        for (index, _), row in zip(self.conditions, flags, strict=True):
            chosen = [index if holds else later for holds, later in zip(row, chosen, strict=True)]
        return chosen


@dataclass(frozen=True, slots=True)
class Named:
    """Compiled expressions by name; ``tail`` and ``memories`` as in :class:`Rules`."""

    terms: Mapping[str, Term]
    tail: int
    memories: Memories

    def value(self, name: str, signals: Signals) -> Tensor:
        """The value of one of them in B rows, [B]: bool for a condition, int64 where all in it is whole,
        float64 where ``draw`` is in it, else float32."""
        return signals.once(("named", name), lambda: self.terms[name].over(signals))


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
    terms: list[Term] = []
    scope = Scope(params, heads)
    otherwise = -1
    for index, rule in enumerate(rules):
        condition = _compiled(f"rule {index}", rule.when, scope)
        if condition.kind != "truth":
            raise ProtocolError(f"rule {index}: a number, not a condition")
        if condition.run is not None:
            conditions.append((index, condition.run))
            terms.append(condition)
        elif condition.value:
            otherwise = index
            break
    return Rules(tuple(reversed(conditions)), otherwise, *_looks_back(terms, scope))


def compile_named(
    trees: Mapping[str, Any], params: Collection[str], heads: Mapping[str, Head] = MappingProxyType({})
) -> Named:
    """Compile the expressions that a route in Python reads by name.

    :raises ProtocolError: if one is not a tree as above over ``params`` and ``heads``.
    :raises ModelLoadError: if one asks for the threshold of a head that has none.
    """
    scope = Scope(params, heads)
    terms = {name: _compiled(f"signal {name!r}", tree, scope) for name, tree in trees.items()}
    return Named(terms, *_looks_back(terms.values(), scope))


def _compiled(what: str, tree: Any, scope: Scope) -> Term:
    try:
        return compile_tree(tree, scope)
    except Malformed as error:
        raise ProtocolError(f"{what}: {error}") from None


def _looks_back(terms: Iterable[Term], scope: Scope) -> tuple[int, Memories]:
    """How far terms look back, and the memories that they need."""
    reads = {read for term in terms for read in term.reads}
    memories = [memory for memory in scope.memories.values() if ("memory", memory) in reads]
    return max((length for of, length in reads if of == "tail"), default=0), Memories.of(memories)
