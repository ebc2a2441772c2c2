"""Expression trees compiled to closures over torch tensors, as :mod:`tokenflow.routing.rules` says."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from tokenflow.routing.signals import Signals

Number = int | float
Run = Callable[[Signals], Tensor]

WHOLE_SIGNALS = ("token", "position", "run_length")
REAL_SIGNALS = ("entropy", "entropy_nats", "confidence", "margin", "logprob")
_SIGNAL_LIMIT = 2**31
_WHOLE_LIMIT = 2**63


class Malformed(Exception):
    """A tree that no front end makes."""


@dataclass(frozen=True, slots=True)
class Term:
    """A compiled subtree: ``run`` over signals, or else the constant ``value``.

    A whole term is at most ``limit`` in magnitude; ``reads`` holds its (kind, name) leaves.
    """

    kind: Literal["whole", "real", "truth"]
    value: Number = 0
    run: Run | None = None
    limit: int = 0
    reads: frozenset[tuple[str, str]] = frozenset()


def compile_tree(tree: Any, params: Collection[str]) -> Term:
    """Compile a condition or a number.

    :raises Malformed: if ``tree`` is neither, or names a parameter outside ``params``.
    """
    match tree:
        case ["number", int() | float() as value] if not isinstance(value, bool):
            whole = isinstance(value, int) and abs(value) < _WHOLE_LIMIT
            return Term("whole", value, limit=abs(int(value))) if whole else Term("real", float(value))
        case ["boolean", bool() as value]:
            return Term("truth", value)
        case ["signal", str() as name] if name in WHOLE_SIGNALS:
            reads = frozenset({("signal", name)})
            return Term("whole", run=operator.attrgetter(name), limit=_SIGNAL_LIMIT, reads=reads)
        case ["signal", str() as name] if name in REAL_SIGNALS:
            return Term("real", run=operator.methodcaller(name), reads=frozenset({("signal", name)}))
        case ["param", str() as name] if name in params:
            return Term("real", run=lambda signals: signals.params[name], reads=frozenset({("param", name)}))
        case [("number" | "boolean" | "signal" | "param") as node, *_]:
            raise Malformed(f"unknown {node} {tree!r}")
        case [str() as node, *arguments]:
            return _operation(node, [compile_tree(argument, params) for argument in arguments])
    raise Malformed(f"not an expression: {tree!r}")


def _operation(node: str, terms: list[Term]) -> Term:
    truths, count = sum(term.kind == "truth" for term in terms), len(terms)
    if truths == count == 1 and node == "not":
        return _negation(terms[0])
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
    kind: Literal["whole", "real", "truth"],
    function: Callable[[Any, Any], Any],
    left: Term,
    right: Term,
    limit: int = 0,
    fold: Callable[[Any, Any], Any] | None = None,
) -> Term:
    """Apply ``function`` to tensors, or one tensor and a number; ``fold`` is its form for two numbers."""
    if left.run is None and right.run is None:
        return Term(kind, (fold or function)(left.value, right.value), limit=limit)
    a, b = _operand(left), _operand(right)
    return Term(kind, run=lambda s: function(a(s), b(s)), limit=limit, reads=left.reads | right.reads)


def _operand(term: Term) -> Callable[[Signals], Any]:
    """What to call for a term's tensor, or for its constant as tensors meet it: rounded to float32."""
    if term.run is not None:
        return term.run
    value = torch.tensor(term.value, dtype=torch.float32).item() if term.kind == "real" else term.value
    return lambda s: value


def _real(term: Term) -> Term:
    inner = term.run
    if term.kind == "real":
        return term
    if inner is None:
        return Term("real", float(term.value))
    return Term("real", run=lambda s: inner(s).float(), reads=term.reads)


def _arithmetic(function: Callable[[Any, Any], Any], bound: Callable[[int, int], int]) -> Binary:
    def make(left: Term, right: Term) -> Term:
        if left.kind == right.kind == "whole" and (limit := bound(left.limit, right.limit)) < _WHOLE_LIMIT:
            return _binary("whole", function, left, right, limit)
        return _binary("real", function, _real(left), _real(right))

    return make


def _quotient(left: Term, right: Term) -> Term:
    return _binary("real", _divide, _real(left), _real(right), fold=_divide_numbers)


def _remainder(left: Term, right: Term) -> Term:
    if left.kind == right.kind == "whole" and right.run is None and right.value != 0:
        return _binary("whole", torch.remainder, left, right, right.limit, operator.mod)
    return _binary("real", _modulo, _real(left), _real(right), fold=_modulo_of_numbers)


def _comparison(function: Callable[[Any, Any], Any]) -> Binary:
    def make(left: Term, right: Term) -> Term:
        if left.run is None and right.run is None:
            return _binary("truth", function, left, right)
        left, right = _whole_beside(left, right), _whole_beside(right, left)
        if left.kind != right.kind:
            left, right = _real(left), _real(right)
        return _binary("truth", function, left, right)

    return make


def _whole_beside(term: Term, other: Term) -> Term:
    """A real constant without a fraction, beside a whole term: whole, so that they compare exactly."""
    if other.kind == "whole" and term.kind == "real" and term.run is None:
        value = float(term.value)
        if value.is_integer() and abs(value) < _WHOLE_LIMIT:
            return Term("whole", int(value))
    return term


def _extreme(before: Callable[[Any, Any], Any]) -> Binary:
    def choose(a: Any, b: Any) -> Tensor:
        return torch.where(before(b, a), b, a)

    def fold(a: Number, b: Number) -> Number:
        return b if before(b, a) else a

    def make(left: Term, right: Term) -> Term:
        if left.kind == right.kind == "whole":
            return _binary("whole", choose, left, right, max(left.limit, right.limit), fold)
        return _binary("real", choose, _real(left), _real(right), fold=fold)

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


def _divide(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    # A number over a tensor would be computed as a product with the reciprocal, rounded twice.
    return torch.div(a if isinstance(a, Tensor) else torch.tensor(a, dtype=torch.float32), b)


def _modulo(a: Any, b: Any) -> Tensor:
    # In double: the vectorised fmod of float32 is inexact for quotients beyond 1e38, the scalar one is not.
    a, b = (x.double() if isinstance(x, Tensor) else x for x in (a, b))
    return torch.remainder(a, b).float()


def _divide_numbers(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _modulo_of_numbers(a: float, b: float) -> float:
    return math.nan if b == 0 or math.isinf(a) else a % b


Binary = Callable[[Term, Term], Term]
_LOGIC: Mapping[str, Binary] = {
    "and": _connective(operator.and_, neutral=True),
    "or": _connective(operator.or_, neutral=False),
}
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
