"""What a recipe must be beyond its shape: names that exist, conditions that parse, models in reach.

Every check reads the raw data and skips what is not there or has the wrong type, since the shape check
reports that; so one run finds everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenflow.dsl.expr import RESERVED, SIGNALS, UNCLOSED, ExpressionError, parse_condition
from tokenflow.dsl.ir import Expr
from tokenflow.dsl.paths import model_path
from tokenflow.dsl.schema import NAME, NAME_RULE
from tokenflow.dsl.source import Document
from tokenflow.dsl.wording import Path, did_you_mean, show

Conditions = dict[tuple[str, int], Expr]
"""The parsed ``when`` of every rule, by model and index."""


def check(document: Document) -> Conditions:
    """Report every problem of meaning in the document; the conditions of the rules that are right."""
    params = _mapping(document.data.get("params"))
    _check_params(document, params)
    conditions = _check_conditions(document, params)
    models = document.data.get("models")
    if isinstance(models, dict):
        _check_models(document, models)
        _check_batching(document, models)
        destinations = _check_routes(document, models)
        entry = document.data.get("entry")
        if isinstance(entry, str) and entry not in models:
            document.report(("entry",), _unknown_model(entry, models))
        elif isinstance(entry, str) and destinations is not None:
            _check_reach(document, models, entry, destinations)
    return conditions


def _check_params(document: Document, params: dict[str, Any]) -> None:
    for name in params:
        if name in SIGNALS:
            message = f'"{name}" is a signal: choose another name'
        elif name in RESERVED:
            message = f'"{name}" is a word of expressions: choose another name'
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            message = 'expected a name of letters, digits and "_" that begins with a letter'
        else:
            continue
        document.report(("params", name), message, at_key=True)


def _check_conditions(document: Document, params: dict[str, Any]) -> Conditions:
    conditions: Conditions = {}
    for name, index, rule in _rules(document):
        path: Path = ("routes", name, index, "when")
        when = rule.get("when")
        if isinstance(when, bool | int | float):
            when = show(when)
        if not isinstance(when, str):
            continue
        try:
            conditions[name, index] = parse_condition(when, params)
        except ExpressionError as error:
            for offset, message in error.faults:
                if message == UNCLOSED and document.ends_at_comma(path):
                    message += ': a comma ends the value inside "{...}", so put it in quotes'
                document.report(path, message, offset=offset)
    return conditions


def _check_models(document: Document, models: dict[str, Any]) -> None:
    for name, model in models.items():
        if not re.fullmatch(NAME, name):
            document.report(("models", name), f"expected {NAME_RULE}", at_key=True)
        text = _mapping(model).get("path")
        path = ("models", name, "path")
        if isinstance(text, str) and text and model_path(text, document.spot(path).folders) is None:
            document.report(path, f"{show(text)} is neither a directory nor a hub id (owner/name)")


def _check_batching(document: Document, models: dict[str, Any]) -> None:
    batching = _mapping(document.data.get("batching"))
    thresholds = batching.get("thresholds")
    if batching.get("policy") == "auto" and thresholds:
        message = 'thresholds need "policy: fixed"; "auto" chooses its own'
        document.report(("batching", "thresholds"), message, at_key=True)
    for name in _mapping(thresholds):
        if name not in models:
            document.report(("batching", "thresholds", name), _unknown_model(name, models), at_key=True)


def _check_routes(document: Document, models: dict[str, Any]) -> dict[str, set[str]] | None:
    """Check where every rule leads; the models each model leads to, or None if anything there is wrong."""
    destinations: dict[str, set[str]] = {name: set() for name in models}
    routes = document.data.get("routes", {})
    wrong = not isinstance(routes, dict)
    for name, rules in _mapping(routes).items():
        if name not in models:
            document.report(("routes", name), _unknown_model(name, models), at_key=True)
        wrong |= name not in models or not isinstance(rules, list)
    for name, index, rule in _rules(document):
        path: Path = ("routes", name, index, "to")
        to = rule.get("to")
        if isinstance(to, str) and to not in models:
            document.report(path, _unknown_model(to, models))
        elif to == name:
            message = "a rule leads to another model; without a rule that fires, the request stays"
            document.report(path, message)
        elif isinstance(to, str) and name in models:
            destinations[name].add(to)
            continue
        wrong = True
    return None if wrong else destinations


def _check_reach(
    document: Document, models: dict[str, Any], entry: str, destinations: dict[str, set[str]]
) -> None:
    reached, todo = {entry}, [entry]
    while todo:
        new = destinations[todo.pop()] - reached
        reached |= new
        todo += new
    for name in models:
        if name not in reached:
            message = f'no route leads here from the entry "{entry}": add one, or remove the model'
            document.report(("models", name), message, at_key=True)


def _unknown_model(name: str, models: dict[str, Any]) -> str:
    hint = did_you_mean(name, models) or f" (models: {', '.join(models) or 'none'})"
    return f"unknown model {show(name)}{hint}"


def _rules(document: Document) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every rule: the model it stands under, its index, and its keys."""
    for name, rules in _mapping(document.data.get("routes")).items():
        for index, rule in enumerate(rules if isinstance(rules, list) else ()):
            yield name, index, _mapping(rule)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
