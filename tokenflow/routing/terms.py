"""Terms: numbers and conditions as closures over torch tensors, computing as
:mod:`tokenflow.routing.rules` says."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from tokenflow.routing.signals import Signals

Number = int | float
Run = Callable[[Signals], Tensor]
Kind = Literal["whole", "real", "double", "truth"]

WHOLE_LIMIT = 2**63
_DTYPES: Mapping[Kind, torch.dtype] = {
    "whole": torch.int64,
    "real": torch.float32,
    "double": torch.float64,
    "truth": torch.bool,
}


class Malformed(Exception):
    """A tree that no front end makes."""


@dataclass(frozen=True, slots=True)
class Term:
    """A compiled subtree: ``run`` over signals, or else the constant ``value``.

    A whole term is at most ``limit`` in magnitude.  ``reads`` holds what it depends on of earlier steps as
    pairs: ("tail", how many tokens before the sampled one), ("memory", a window or momentum).
    """

    kind: Kind
    value: Number = 0
    run: Run | None = None
    limit: int = 0
    reads: frozenset[tuple[str, Any]] = frozenset()

    def over(self, signals: Signals) -> Tensor:
        """The value in B rows, [B]: bool for a condition, int64, float32 or float64 for a number."""
        if self.run is not None:
            return self.run(signals)
        return _constant(self).to(signals.device).expand(signals.batch)


def operation(node: str, terms: list[Term]) -> Term:
    """The term that an operation makes of terms.

    :raises Malformed: if there is no such operation on such terms.
    """
    truths, count = sum(term.kind == "truth" for term in terms), len(terms)
    if truths == count == 1 and node in _UNARY_LOGIC:
        return _UNARY_LOGIC[node](terms[0])
    if truths == count > 1 and node in _LOGIC:
        return reduce(_LOGIC[node], terms)
    if truths == 0:
        if count == 1 and node in _UNARY:
            return _unary(_UNARY[node], terms[0])
        if count == 2 and node in _BINARY:
            return _BINARY[node](*terms)
        if count > 1 and node in _EXTREMES:
            return reduce(_EXTREMES[node], terms)
    raise Malformed(f"unknown node {node!r} over {count} arguments, {truths} of them conditions")


def _unary(function: Callable[[Any], Any], term: Term) -> Term:
    inner = term.run
    if inner is None:
        return Term(term.kind, function(term.value), limit=term.limit)
    return Term(term.kind, run=lambda s: function(inner(s)), limit=term.limit, reads=term.reads)


def _binary(
    kind: Kind, function: Callable[[Tensor, Tensor], Tensor], left: Term, right: Term, limit: int = 0
) -> Term:
    """Apply ``function``: to constants now, just as it would be in a step."""
    if left.run is None and right.run is None:
        return Term(kind, function(_constant(left), _constant(right)).item(), limit=limit)
    a, b = _operand(left), _operand(right)
    return Term(kind, run=lambda s: function(a(s), b(s)), limit=limit, reads=left.reads | right.reads)


def _operand(term: Term) -> Run:
    """What to call for a term's tensor."""
    if term.run is not None:
        return term.run
    value = _constant(term)
    return lambda s: value


def _constant(term: Term) -> Tensor:
    """A constant as a tensor of no dimensions, which is met faster than a number."""
    return torch.tensor(term.value, dtype=_DTYPES[term.kind])


def _meet(left: Term, right: Term) -> tuple[Kind, Term, Term]:
    """Two numbers as they meet where they are not both whole: both double if one of them is, else real."""
    kind: Kind = "double" if "double" in (left.kind, right.kind) else "real"
    return kind, _as(kind, left), _as(kind, right)


def _as(kind: Kind, term: Term) -> Term:
    inner = term.run
    if term.kind == kind:
        return term
    if inner is None:
        return Term(kind, float(term.value))
    return Term(kind, run=lambda s: inner(s).to(_DTYPES[kind]), reads=term.reads)


def _arithmetic(function: Callable[[Any, Any], Any], bound: Callable[[int, int], int]) -> Binary:
    def make(left: Term, right: Term) -> Term:
        if left.kind == right.kind == "whole" and (limit := bound(left.limit, right.limit)) < WHOLE_LIMIT:
            return _binary("whole", function, left, right, limit)
        kind, left, right = _meet(left, right)
        return _binary(kind, function, left, right)

    return make


def _quotient(left: Term, right: Term) -> Term:
    kind, left, right = _meet(left, right)
    return _binary(kind, torch.div, left, right)


def _remainder(left: Term, right: Term) -> Term:
    if left.kind == right.kind == "whole" and right.run is None and right.value != 0:
        return _binary("whole", torch.remainder, left, right, right.limit)
    kind, left, right = _meet(left, right)
    return _binary(kind, _modulo, left, right)


def _comparison(function: Callable[[Any, Any], Any]) -> Binary:
    def make(left: Term, right: Term) -> Term:
        left, right = _whole_beside(left, right), _whole_beside(right, left)
        if left.kind != right.kind:
            _, left, right = _meet(left, right)
        return _binary("truth", function, left, right)

    return make


def _whole_beside(term: Term, other: Term) -> Term:
    """A real constant without a fraction, beside a whole term: whole, so that they compare exactly."""
    if other.kind == "whole" and term.kind == "real" and term.run is None:
        value = float(term.value)
        if value.is_integer() and abs(value) < WHOLE_LIMIT:
            return Term("whole", int(value))
    return term


def _extreme(before: Callable[[Any, Any], Any]) -> Binary:
    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(before(b, a), b, a)

    def make(left: Term, right: Term) -> Term:
        if left.kind == right.kind == "whole":
            return _binary("whole", choose, left, right, max(left.limit, right.limit))
        kind, left, right = _meet(left, right)
        return _binary(kind, choose, left, right)

    return make


def _connective(function: Callable[[Any, Any], Any], neutral: bool) -> Binary:
    def make(left: Term, right: Term) -> Term:
        for term, other in ((left, right), (right, left)):
            if term.run is None:
                return other if term.value is neutral else term
        return _binary("truth", function, left, right)

    return make


def _negation(term: Term) -> Term:
    inner = term.run
    if inner is None:
        return Term("truth", not term.value)
    return Term("truth", run=lambda s: ~inner(s), reads=term.reads)


def _zero_or_one(term: Term) -> Term:
    inner = term.run
    if inner is None:
        return Term("whole", int(term.value), limit=1)
    return Term("whole", run=lambda s: inner(s).long(), limit=1, reads=term.reads)


def _modulo(a: Tensor, b: Tensor) -> Tensor:
    # In double: the vectorised fmod of float32 is inexact for quotients beyond 1e38, the scalar one is not.
    return torch.remainder(a.double(), b.double()).to(a.dtype)


Binary = Callable[[Term, Term], Term]
_LOGIC: Mapping[str, Binary] = {
    "and": _connective(operator.and_, neutral=True),
    "or": _connective(operator.or_, neutral=False),
}
_UNARY_LOGIC: Mapping[str, Callable[[Term], Term]] = {"not": _negation, "bool": _zero_or_one}
_UNARY: Mapping[str, Callable[[Any], Any]] = {"neg": operator.neg, "abs": abs}
_BINARY: Mapping[str, Binary] = {
    "+": _arithmetic(operator.add, operator.add),
    "-": _arithmetic(operator.sub, operator.add),
    "*": _arithmetic(operator.mul, operator.mul),
    "/": _quotient,
    "%": _remainder,
    "<": _comparison(operator.lt),
    "<=": _comparison(operator.le),
    ">": _comparison(operator.gt),
    ">=": _comparison(operator.ge),
    "==": _comparison(operator.eq),
    "!=": _comparison(operator.ne),
}
_EXTREMES: Mapping[str, Binary] = {"min": _extreme(operator.lt), "max": _extreme(operator.gt)}
