"""Expressions evaluated for one step of one request in plain Python, from the documented semantics alone."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

WHOLE = ("token", "position", "run_length")


@dataclass(frozen=True)
class Step:
    """Signals and parameters of a step by name, scores and thresholds of heads as ``head NAME`` and
    ``threshold NAME``; the output before the sampled token; the request's earlier steps at this model."""

    row: Mapping[str, float]
    output: Sequence[int] = ()
    earlier: Sequence[Step] = ()


class Value(NamedTuple):
    """A number, how it is held, whether it is constant, and a bound if it is whole."""

    number: float
    kind: Literal["whole", "real", "double"]
    constant: bool = False
    bound: int = 0


def float32(number: float) -> float:
    """The nearest float32; doubles hold it exactly."""
    return ctypes.c_float(number).value


def holds(tree: Any, step: Step) -> bool:
    """Whether a condition holds at a step."""
    node, *arguments = tree
    match node:
        case "boolean":
            return bool(arguments[0])
        case "not":
            return not holds(arguments[0], step)
        case "and":
            return all(holds(argument, step) for argument in arguments)
        case "or":
            return any(holds(argument, step) for argument in arguments)
        case "at":
            return ends([*step.output, int(step.row["token"])], arguments[0])
        case "follows":
            return not step.output or ends(step.output, arguments[0])
    left, right = (value(argument, step) for argument in arguments)
    if "whole" in (left.kind, right.kind):
        left, right = whole_constant(left), whole_constant(right)
    left, right = meet(left, right)
    compare: Callable[[float, float], bool] = COMPARISONS[node]
    return compare(left.number, right.number)


def ends(output: Sequence[int], sequences: Sequence[Sequence[int]]) -> bool:
    """Whether an output ends in one of some sequences."""
    return any(list(output[-len(sequence) :]) == list(sequence) for sequence in sequences)


def value(tree: Any, step: Step) -> Value:
    """A number at a step."""
    node, *arguments = tree
    match node:
        case "number":
            number = arguments[0]
            return Value(number, "whole" if isinstance(number, int) else "real", True, abs(int(number)))
        case "signal" | "param":
            name = arguments[0]
            kind: Any = "whole" if name in WHOLE else "double" if name == "draw" else "real"
            return Value(step.row[name], kind, bound=2**31)
        case "head":
            return Value(step.row[f"head {arguments[0]}"], "real")
        case "threshold":
            return Value(step.row[f"threshold {arguments[0]}"], "real", True)
        case "bool":
            return Value(int(holds(arguments[0], step)), "whole", bound=1)
        case "window":
            recent = [*step.earlier, step][-arguments[1] :]
            total = reduce(operator.add, (float(value(arguments[0], at).number) for at in recent), 0.0)
            return Value(float32(total / len(recent)), "real")
        case "momentum":
            average = 0.0
            for at in (*step.earlier, step):
                average = arguments[1] * average + (1 - arguments[1]) * float(value(arguments[0], at).number)
            return Value(float32(average), "real")
    values = [value(argument, step) for argument in arguments]
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
    whole = left.kind == right.kind == "whole"
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
        left, right = meet(left, right, anyway=True)
    number = ARITHMETIC[node](left.number, right.number)
    return Value(float32(number) if left.kind == "real" else number, left.kind, constant, bound)


def extreme(better: Callable[[float, float], bool], left: Value, right: Value) -> Value:
    constant = left.constant and right.constant
    bound = max(left.bound, right.bound)
    left, right = meet(left, right)
    chosen = right if better(right.number, left.number) else left
    return chosen._replace(constant=constant, bound=bound)


def meet(left: Value, right: Value, anyway: bool = False) -> tuple[Value, Value]:
    """Both whole, both real or both double; whole ones stay so, unless they become real ``anyway``."""
    if left.kind == right.kind == "whole" and not anyway:
        return left, right
    kind: Any = "double" if "double" in (left.kind, right.kind) else "real"
    return held(left, kind), held(right, kind)


def held(of: Value, kind: Literal["real", "double"]) -> Value:
    """A number as real or double."""
    number = float(of.number)
    return of._replace(number=number if kind == "double" else float32(number), kind=kind)


def whole_constant(of: Value) -> Value:
    fits = of.constant and math.isfinite(of.number) and of.number == int(of.number) and abs(of.number) < 2**63
    return of._replace(number=int(of.number), kind="whole") if fits else of


def divide(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(1, a) * math.copysign(math.inf, b)


def remainder(a: float, b: float) -> float:
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if b == 0 or math.isinf(a) or math.isnan(a) or math.isnan(b):
        return math.nan
    rest = math.fmod(a, b)
    return rest + b if rest != 0 and (rest < 0) != (b < 0) else rest


ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
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
