"""What the expressions of a recipe say: conditions of rules, heads that they ask, weights of an ensemble.

Works on raw data, and skips what is not there or has the wrong type, since the shape check reports that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from tokenflow.dsl.expr import parse_condition, parse_weight
from tokenflow.dsl.ir import Expr
from tokenflow.dsl.scan import UNCLOSED, ExpressionError
from tokenflow.dsl.source import Document
from tokenflow.dsl.tree import walk
from tokenflow.dsl.weights import NO_WEIGHT, evaluate, weight_rule
from tokenflow.dsl.wording import Path, show

NO_CONDITION = 'missing a condition: "when" (an expression), "after" (so many tokens) or "at" (a text)'

Conditions = dict[tuple[str, int], Expr]
"""The parsed ``when`` of every rule that has one, by model and index."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What is right: conditions, the weight of each model that may write, the model of each head."""

    conditions: Conditions
    weights: dict[str, Expr]
    owners: dict[str, str]


def read_meaning(document: Document) -> Meaning:
    """Read every expression of the document; problems are reported there."""
    conditions, complete = _read_conditions(document)
    owners = _find_owners(document, conditions, complete)
    return Meaning(conditions, _read_weights(document), owners)


def rules_of(document: Document) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every rule: the model it stands under, its index, and its keys."""
    for name, listed in mapping(document.data.get("routes")).items():
        for index, rule in enumerate(listed if isinstance(listed, list) else ()):
            yield name, index, mapping(rule)


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def _read_conditions(document: Document) -> tuple[Conditions, bool]:
    """The conditions that are right, and whether those are all."""
    conditions: Conditions = {}
    complete = True
    params, heads = mapping(document.data.get("params")), mapping(document.data.get("heads"))
    for name, index, rule in rules_of(document):
        if rule and not rule.keys() & {"when", "after", "at"}:
            document.report(("routes", name, index), NO_CONDITION)
        when = rule.get("when")
        if isinstance(when, bool | int | float):
            when = show(when)
        if not isinstance(when, str):
            complete &= "when" not in rule
            continue
        path: Path = ("routes", name, index, "when")
        try:
            conditions[name, index] = parse_condition(when, params, heads)
        except ExpressionError as error:
            complete = False
            _report(document, path, error)
    return conditions, complete


def heads_in(tree: Expr, *nodes: str) -> Iterator[str]:
    """Names of the router heads that an expression asks, for anything or for what ``nodes`` say."""
    return (cast(str, of) for node, of, *_ in walk(tree) if node in (nodes or ("head", "threshold")))


def _find_owners(document: Document, conditions: Conditions, complete: bool) -> dict[str, str]:
    """The model whose rules ask each head; heads that none or several ask are reported."""
    asking: dict[str, dict[str, None]] = {name: {} for name in mapping(document.data.get("heads"))}
    for (model, _), tree in conditions.items():
        for name in heads_in(tree):
            asking[name][model] = None
    for model, python in document.python.items():
        named = {*python.heads, *(name for tree in python.signals.values() for name in heads_in(tree))}
        for name in asking.keys() & named:
            asking[name][model] = None
    for name, models in asking.items():
        if len(models) > 1:
            message = (
                f"{' and '.join(models)} ask it, but a head reads the states of one model: "
                "declare one for each"
            )
        elif not models and complete:
            message = f'no rule asks it: use head("{name}") in the rules of a model, or remove it'
        else:
            continue
        document.report(("heads", name), message, at_key=True)
    return {name: model for name, models in asking.items() for model in models}


def _read_weights(document: Document) -> dict[str, Expr]:
    draw = mapping(document.data.get("draw"))
    params = mapping(document.data.get("params"))
    defaults = {name: value for name, value in params.items() if _is_number(value)}
    weights: dict[str, Expr] = {}
    total = 0.0
    for name, written in draw.items():
        path: Path = ("draw", name)
        tree: Expr = ("number", written)
        if isinstance(written, str):
            try:
                tree = parse_weight(written, params)
            except ExpressionError as error:
                _report(document, path, error)
                continue
        elif not _is_number(written):
            continue
        if any(node == "param" and of not in defaults for node, of, *_ in walk(tree)):
            continue
        weight = evaluate(tree, defaults)
        if (wanted := weight_rule(weight)) is not None:
            got = (
                f"but {show(written)} is {weight:.6g}" if isinstance(written, str) else f"got {show(written)}"
            )
            document.report(path, f"{wanted}, {got}")
            continue
        weights[name] = tree
        total += weight
    if isinstance(document.data.get("draw"), dict) and len(weights) == len(draw) and not total:
        document.report(("draw",), NO_WEIGHT, at_key=True)
    return {name: tree for name, tree in weights.items() if tree[:1] != ("number",) or tree[1]}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _report(document: Document, path: Path, error: ExpressionError) -> None:
    for offset, message in error.faults:
        if message.endswith(UNCLOSED) and document.ends_at_comma(path):
            message += ': a comma ends the value inside "{...}", so put it in quotes'
        document.report(path, message, offset=offset)
