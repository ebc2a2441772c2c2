"""What a recipe must be beyond its shape: names that exist, conditions that parse, models in reach.

Every check reads the raw data and skips what is not there or has the wrong type, since the shape check
reports that; so one run finds everything.
"""

from __future__ import annotations

import re
from typing import Any

from tokenflow.dsl.batching import check_batching
from tokenflow.dsl.endpoints import check_endpoints
from tokenflow.dsl.expr import RESERVED, SIGNALS
from tokenflow.dsl.meaning import Meaning, heads_in, mapping, read_meaning, rules_of
from tokenflow.dsl.paths import head_path, model_path
from tokenflow.dsl.schema import NAME, NAME_RULE
from tokenflow.dsl.simulated import check_simulated
from tokenflow.dsl.source import Document
from tokenflow.dsl.wording import Path, show, unknown_model


def check(document: Document) -> Meaning:
    """Report every problem of meaning in the document; what its expressions say where they are right."""
    _check_params(document, mapping(document.data.get("params")))
    _check_heads(document)
    meaning = read_meaning(document)
    _check_thresholds(document, meaning)
    if "entry" not in document.data and "draw" not in document.data:
        document.report((), 'missing key "entry"', at_key=True)
    models = document.data.get("models")
    if isinstance(models, dict):
        _check_models(document, models)
        check_simulated(document, models)
        check_batching(document, models)
        destinations = _check_routes(document, models)
        entry = document.data.get("entry", next((name for name in models if name in meaning.weights), None))
        if isinstance(entry, str) and entry not in models:
            document.report(("entry",), unknown_model(entry, models))
        if "draw" in document.data:
            _check_draw(document, models)
        elif isinstance(entry, str) and entry in models and destinations is not None:
            _check_reach(document, models, entry, destinations)
        _check_budgets(document, models, entry)
        _check_rollback(document, models)
        _check_roles(document, models, meaning)
        check_endpoints(document, models, meaning)
        _check_on_failure(document, models)
    return meaning


def _check_params(document: Document, params: dict[str, Any]) -> None:
    for name in params:
        if (fault := name_fault(name)) is not None:
            document.report(("params", name), fault, at_key=True)


def name_fault(name: str) -> str | None:
    """Why a number of the recipe cannot have this name, or None."""
    if name in SIGNALS:
        return f'"{name}" is a signal: choose another name'
    if name in RESERVED:
        return f'"{name}" is a word of expressions: choose another name'
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return 'expected a name of letters, digits and "_" that begins with a letter'
    return None


def _check_heads(document: Document) -> None:
    for name, head in mapping(document.data.get("heads")).items():
        if not re.fullmatch(NAME, name):
            document.report(("heads", name), f"expected {NAME_RULE}", at_key=True)
        kind, text, path = mapping(head).get("kind"), mapping(head).get("path"), ("heads", name, "path")
        if kind in ("r2r", "citer") and "path" not in head:
            document.report(
                ("heads", name), 'missing key "path" (a checkpoint file or directory)', at_key=True
            )
        if kind == "co_llm" and "dtype" in mapping(head):
            message = "a co_llm head is a row of its model, and computes in the model's dtype: remove this"
            document.report(("heads", name, "dtype"), message, at_key=True)
        if isinstance(text, str) and text and head_path(text, document.spot(path).folders) is None:
            document.report(
                path, f"{show(text)} is neither a file, a directory nor a hub path (owner/name/file)"
            )


def _check_thresholds(document: Document, meaning: Meaning) -> None:
    trees = [*meaning.conditions.values()]
    trees += [tree for python in document.python.values() for tree in python.signals.values()]
    heads = mapping(document.data.get("heads"))
    for name in dict.fromkeys(name for tree in trees for name in heads_in(tree, "threshold")):
        head = mapping(heads[name])
        if head.get("kind") == "citer" and "threshold" not in head:
            message = (
                f'a CITER file stores no threshold, and a rule asks for threshold("{name}"): give it here'
            )
            document.report(("heads", name), message, at_key=True)


def _check_models(document: Document, models: dict[str, Any]) -> None:
    for name, model in models.items():
        if not re.fullmatch(NAME, name):
            document.report(("models", name), f"expected {NAME_RULE}", at_key=True)
        text = mapping(model).get("path")
        path = ("models", name, "path")
        if isinstance(text, str) and text and model_path(text, document.spot(path).folders) is None:
            document.report(path, f"{show(text)} is neither a directory nor a hub id (owner/name)")


def _check_routes(document: Document, models: dict[str, Any]) -> dict[str, set[str]] | None:
    """Check where every rule leads; the models each model leads to, or None if anything there is wrong."""
    destinations: dict[str, set[str]] = {name: set() for name in models}
    routes = document.data.get("routes", {})
    wrong = not isinstance(routes, dict)
    for name, rules in mapping(routes).items():
        if name not in models:
            document.report(("routes", name), unknown_model(name, models), at_key=True)
        if rules and name in document.python and document.python[name].routes:
            message = "the model has a route in Python, which takes the place of rules: remove one of them"
            document.report(("routes", name), message, at_key=True)
        wrong |= name not in models or not isinstance(rules, list)
    for name, index, rule in rules_of(document):
        path: Path = ("routes", name, index, "to")
        to = rule.get("to")
        if isinstance(to, str) and to not in models:
            document.report(path, unknown_model(to, models))
        elif to == name:
            message = "a rule leads to another model; without a rule that fires, the request stays"
            document.report(path, message)
        elif isinstance(to, str) and name in models:
            destinations[name].add(to)
            continue
        wrong = True
    destinations |= {name: set(models) for name, python in document.python.items() if python.routes}
    verifying = set(_verifying(models)) if "rollback" in document.data else set()
    destinations = {name: leads | verifying for name, leads in destinations.items()}
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


def _check_draw(document: Document, models: dict[str, Any]) -> None:
    draw = document.data["draw"]
    for name in mapping(draw):
        if name not in models:
            document.report(("draw", name), unknown_model(name, models), at_key=True)
    for name in models if isinstance(draw, dict) else ():
        if name not in draw:
            message = "it has no weight in draw: give it one (0 keeps it out), or remove the model"
            document.report(("models", name), message, at_key=True)
    if document.data.get("routes"):
        message = "draw decides after every token, so there are no other rules: remove one of the two"
        document.report(("routes",), message, at_key=True)


def _check_budgets(document: Document, models: dict[str, Any], entry: object) -> None:
    for name, budget in mapping(document.data.get("budgets")).items():
        path: Path = ("budgets", name)
        if name not in models:
            document.report(path, unknown_model(name, models), at_key=True)
        elif name == entry:
            message = "the entry has no budget: requests come back to it once another model's is used up"
            document.report(path, message, at_key=True)
        elif mapping(models[name]).get("verify") is True and mapping(budget).get("max_share") is not None:
            message = "a model that takes tokens of others back has no bound to its share: give max_tokens"
            document.report((*path, "max_share"), message)
        if isinstance(budget, dict) and budget.get("max_share") is None and budget.get("max_tokens") is None:
            document.report(path, 'give "max_share", "max_tokens" or both')


def _check_rollback(document: Document, models: dict[str, Any]) -> None:
    verifying = _verifying(models)
    receiving = any(python.receive or python.router for python in document.python.values())
    if "rollback" in document.data and not verifying and not receiving:
        message = 'no model has "verify: true": tentative tokens need one that checks them'
        document.report(("rollback",), message, at_key=True)
    if "rollback_to" in document.data and "rollback" not in document.data:
        message = 'it needs "rollback: n", the most tokens of a step that may be tentative'
        document.report(("rollback_to",), message, at_key=True)
    for name in verifying if "rollback" not in document.data else ():
        message = 'nothing to verify without "rollback: n", the number of tokens that may be tentative'
        document.report(("models", name, "verify"), message)
    if (entry := document.data.get("entry")) in verifying:
        message = (
            "what a model that checks writes itself is final at once, and the entry writes first: let it be "
            "checked by another model"
        )
        document.report(("models", str(entry), "verify"), message)
    checker = next((name for name in verifying if name != entry), "")
    for name in verifying:
        if name not in (entry, checker):
            message = (
                f"{checker} checks already, and what {name} writes would be final unchecked: remove this"
            )
            document.report(("models", name, "verify"), message)


def _verifying(models: dict[str, Any]) -> list[str]:
    return [name for name, model in models.items() if mapping(model).get("verify") is True]


def _check_roles(document: Document, models: dict[str, Any], meaning: Meaning) -> None:
    draw = mapping(document.data.get("draw"))
    for role in ("chat_template", "scorer"):
        name = document.data.get(role)
        if isinstance(name, str) and name not in models:
            document.report((role,), unknown_model(name, models))
        elif isinstance(name, str) and name in draw and name not in meaning.weights:
            document.report((role,), f"model {show(name)} has no weight in draw, so it is never loaded")


def _check_on_failure(document: Document, models: dict[str, Any]) -> None:
    if document.data.get("on_failure") != "degrade":
        return
    if len(models) == 1:
        document.report(("on_failure",), "there is no other model to go on with: say fail, or leave it out")
    elif "rollback" in document.data:
        message = "tentative tokens need the model that checks them: say fail, or leave it out"
        document.report(("on_failure",), message)
