"""Expressions evaluated for one row in plain Python, from the documented semantics alone."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

WHOLE = ("token", "position", "run_length")


class Value(NamedTuple):
    """A number, whether it is whole, whether it is constant, and a bound if it is whole."""

    number: float
    whole: bool
    constant: bool
    bound: int = 0


def float32(number: float) -> float:
    """The nearest float32; doubles hold it exactly."""
    return ctypes.c_float(number).value


def holds(tree: Any, row: Mapping[str, float]) -> bool:
    """Whether a condition holds in a row of signals and parameters by name."""
    node, *arguments = tree
    match node:
        case "boolean":
            return bool(arguments[0])
        case "not":
            return not holds(arguments[0], row)
        case "and":
            return all(holds(argument, row) for argument in arguments)
        case "or":
            return any(holds(argument, row) for argument in arguments)
    left, right = (value(argument, row) for argument in arguments)
    if not (left.constant and right.constant):
        left, right = meet(left, right, comparing=True)
    compare: Callable[[float, float], bool] = COMPARISONS[node]
    return compare(left.number, right.number)


def value(tree: Any, row: Mapping[str, float]) -> Value:
    """A number in a row."""
    node, *arguments = tree
    if node == "number":
        number = arguments[0]
        return Value(number, isinstance(number, int), True, abs(int(number)))
    if node in ("signal", "param"):
        name = arguments[0]
        return Value(row[name], name in WHOLE, False, 2**31)
    values = [value(argument, row) for argument in arguments]
    if node == "neg":
        return values[0]._replace(number=-values[0].number)
    if node == "abs":
        return values[0]._replace(number=abs(values[0].number))
    if node in ("min", "max"):
        better = operator.lt if node == "min" else operator.gt
        return reduce(lambda a, b: extreme(better, a, b), values)
    return arithmetic(node, *values)


def arithmetic(node: str, left: Value, right: Value) -> Value:
    constant = left.constant and right.constant
    whole = left.whole and right.whole
    bound = 0
    if node == "%":
        whole = whole and right.constant and right.number != 0
        bound = right.bound
    elif node == "/":
        whole = False
    else:
        bound = left.bound * right.bound if node == "*" else left.bound + right.bound
        whole = whole and bound < 2**63
    if not whole:
        left, right = real(left), real(right)
        if not constant:
            left, right = rounded(left), rounded(right)
    number = ARITHMETIC[node](left.number, right.number, constant)
    return Value(number if whole or constant else float32(number), whole, constant, bound)


def extreme(better: Callable[[float, float], bool], left: Value, right: Value) -> Value:
    constant = left.constant and right.constant
    if not (left.whole and right.whole):
        left, right = real(left), real(right)
        if not constant:
            left, right = rounded(left), rounded(right)
    chosen = right if better(right.number, left.number) else left
    return chosen._replace(constant=constant, bound=max(left.bound, right.bound))


def meet(left: Value, right: Value, comparing: bool) -> tuple[Value, Value]:
    """Both whole or both real, as a comparison brings them together."""
    if left.whole != right.whole:
        left, right = whole_constant(left), whole_constant(right)
    if left.whole and right.whole:
        return left, right
    return rounded(real(left)), rounded(real(right))


def whole_constant(of: Value) -> Value:
    fits = of.constant and math.isfinite(of.number) and of.number == int(of.number) and abs(of.number) < 2**63
    return of._replace(number=int(of.number), whole=True) if fits else of


def real(of: Value) -> Value:
    if not of.whole:
        return of
    return of._replace(number=float(of.number) if of.constant else float32(of.number), whole=False, bound=0)


def rounded(of: Value) -> Value:
    return of._replace(number=float32(of.number))


def divide(a: float, b: float, constant: bool) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(1, a) * math.copysign(math.inf, b)


def remainder(a: float, b: float, constant: bool) -> float:
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if b == 0 or math.isinf(a) or math.isnan(a) or math.isnan(b):
        return math.nan
    if constant:
        return a % b
    rest = math.fmod(a, b)
    return rest + b if rest != 0 and (rest < 0) != (b < 0) else rest


ARITHMETIC: Mapping[str, Callable[[float, float, bool], float]] = {
    "+": lambda a, b, constant: a + b,
    "-": lambda a, b, constant: a - b,
    "*": lambda a, b, constant: a * b,
    "/": divide,
    "%": remainder,
}
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
