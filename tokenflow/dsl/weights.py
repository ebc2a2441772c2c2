"""Weights of an ensemble: arithmetic over params, computed in Python for checks and for the first token.

Later tokens are drawn by rules in the workers, see :mod:`tokenflow.dsl.sugar`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, cast

from tokenflow.dsl.ir import Expr, RecipeIR
from tokenflow.errors import InvalidRequest

MAX_WEIGHT = 1e30
"""Sums of weights stay finite in float32."""
NO_WEIGHT = "at least one weight must be above 0"


def evaluate(tree: Expr, params: Mapping[str, float]) -> float:
    """The value of an expression over params alone; division by zero is as in rules, infinity or NaN."""
    try:
        return _value(tree, params)
    except OverflowError:  # a whole number beyond all floats
        return math.inf


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
    *ends, total = accumulate(weights)
    if not total:
        raise InvalidRequest(NO_WEIGHT, "params")
    names = [name for name, _ in recipe.draw]
    return next((name for name, end in zip(names, ends, strict=False) if number < end / total), names[-1])


def _value(tree: Expr, params: Mapping[str, float]) -> float:
    node, *arguments = tree
    if node == "number":
        return float(cast(float, arguments[0]))
    if node == "param":
        return float(params[cast(str, arguments[0])])
    values = [_value(cast(Expr, argument), params) for argument in arguments]
    return float(_COMPUTE[cast(str, node)](*values))


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
