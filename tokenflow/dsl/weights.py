"""Weights of an ensemble: arithmetic over params, computed in Python for checks and for the first token.

Later tokens are drawn by rules in the workers, see :mod:`tokenflow.dsl.sugar`.  What is computed here is what
is computed there: in float32 after each operation, and exactly where all is whole, so that the same number
draws the same model.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, cast

from tokenflow.dsl.ir import Expr, RecipeIR
from tokenflow.errors import InvalidRequest

MAX_WEIGHT = 1e30
"""Sums of weights stay finite in float32."""
_FLOAT32 = struct.Struct("f")
_WHOLE_LIMIT = 2**63
NO_WEIGHT = "at least one weight must be above 0"


def evaluate(tree: Expr, params: Mapping[str, float]) -> float:
    """The value of an expression over params alone; division by zero is as in rules, infinity or NaN."""
    return _double(_value(tree, params))


def ends(weights: Sequence[Expr]) -> list[Expr]:
    """Where each model's piece of the unit interval ends, but the last: a number if all weights are, else a
    quotient of sums."""
    if all(node == "number" for node, *_ in weights):
        sums = list(accumulate(float(cast(float, value)) for _, value in weights))
        return [("number", part / sums[-1]) for part in sums[:-1]]
    totals: list[Expr] = [weights[0]]
    for weight in weights[1:]:
        totals.append(("+", totals[-1], weight))
    return [("/", part, totals[-1]) for part in totals[:-1]]


def weight_rule(weight: float) -> str | None:
    """What a weight must be that it is not; None if it will do."""
    if math.isnan(weight):
        return "must be a number"
    if weight < 0:
        return "must be at least 0"
    return f"must be at most {MAX_WEIGHT:g}" if weight > MAX_WEIGHT else None


def first_writer(recipe: RecipeIR, params: Mapping[str, float], number: float) -> str:
    """Name of the model that writes the first output token.

    :param params: the request's value of every parameter.
    :param number: uniform in [0, 1), drawn for output position 0; without an ensemble it does not matter.
    :raises InvalidRequest: if the params make a weight negative, or all of them 0.
    """
    if not recipe.draw:
        return recipe.entry
    weights = [evaluate(tree, params) for _, tree in recipe.draw]
    for (name, _), weight in zip(recipe.draw, weights, strict=True):
        if (wanted := weight_rule(weight)) is not None:
            raise InvalidRequest(f"the weight of model {name!r} {wanted}, got {weight:.6g}", "params")
    if not any(weights):
        raise InvalidRequest(NO_WEIGHT, "params")
    names = [name for name, _ in recipe.draw]
    pieces = zip(names, ends([tree for _, tree in recipe.draw]), strict=False)
    return next((name for name, end in pieces if number < evaluate(end, params)), names[-1])


def _value(tree: Expr, params: Mapping[str, float]) -> int | float:
    """An int where all in the expression is whole, else a float."""
    node, *arguments = tree
    if node == "number":
        return cast(float, arguments[0])
    if node == "param":
        return _single(params[cast(str, arguments[0])])
    values = [_value(cast(Expr, argument), params) for argument in arguments]
    compute = _COMPUTE[cast(str, node)]
    if node != "/" and all(isinstance(value, int) for value in values):
        whole = compute(*values)
        if isinstance(whole, int) and abs(whole) < _WHOLE_LIMIT:
            return whole
    first, *others = map(_single, values)
    if not others:
        return _single(compute(first))
    return reduce(lambda a, b: _single(compute(a, b)), others, first)


def _single(value: float) -> float:
    """The float32 next to a number.  Sums, products and quotients that are rounded to double before are the
    same (S. Figueroa, When is double rounding innocuous?, 1995)."""
    try:
        return cast(float, _FLOAT32.unpack(_FLOAT32.pack(_double(value)))[0])
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf if value > 0 else -math.inf


def _divide(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _modulo(a: float, b: float) -> float:
    return math.nan if b == 0 or math.isinf(a) else a % b


_COMPUTE: Mapping[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "abs": abs,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _modulo,
    "min": min,
    "max": max,
}
