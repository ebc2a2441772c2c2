"""What a recipe must say of the models that ``engine: sim`` plays, and of shares of steps in general.

Works on raw data, and skips what is not there or has the wrong type, since the shape check reports that.
"""

from __future__ import annotations

from typing import Any

from tokenflow.dsl.meaning import mapping
from tokenflow.dsl.paths import trace_path
from tokenflow.dsl.source import Document
from tokenflow.dsl.wording import Path, did_you_mean, show, unknown_model

_TOLERANCE = 1e-6


def check_simulated(document: Document, models: dict[str, Any]) -> None:
    """Report what is missing or out of place at models that are simulated, and at those that are not."""
    for name, written in models.items():
        model, path = mapping(written), ("models", name)
        if model.get("engine") == "sim":
            _check_model(document, name, model)
            continue
        if isinstance(written, dict) and "path" not in written:
            document.report(path, 'missing key "path"', at_key=True)
        for key in ("latency_ms", "routing", "trace"):
            if key in model:
                message = 'for "engine: sim" only; what other models are planned with is batching.assume'
                document.report((*path, key), message, at_key=True)


def destinations(document: Document, name: str) -> set[str] | None:
    """Where the rules of a model lead; None if its Python may lead anywhere."""
    python = document.python.get(name)
    if python is not None and python.routes:
        return None
    rules = mapping(document.data.get("routes")).get(name)
    return {
        to
        for rule in (rules if isinstance(rules, list) else ())
        if isinstance(to := mapping(rule).get("to"), str)
    }


def check_shares(document: Document, path: Path, name: str, shares: dict[str, Any]) -> None:
    """Report shares of the steps of model ``name`` that name no destination or param, or exceed 1."""
    models, params = mapping(document.data.get("models")), mapping(document.data.get("params"))
    leads = destinations(document, name)
    total = 0.0
    for to, share in shares.items():
        if to not in models:
            document.report((*path, to), unknown_model(to, models), at_key=True)
        elif to == name:
            message = "what is left of 1 stays: give only the shares that go to other models"
            document.report((*path, to), message, at_key=True)
        elif leads is not None and to not in leads and "draw" not in document.data:
            message = f"no rule of {name} leads there: add one, whose send says what becomes of the token"
            document.report((*path, to), message, at_key=True)
        if isinstance(share, str) and share not in params:
            hint = did_you_mean(share, params) or f" (params: {', '.join(params) or 'none'})"
            document.report((*path, to), f"expected a number or the name of a param, got {show(share)}{hint}")
        value = params.get(share) if isinstance(share, str) else share
        if isinstance(value, int | float) and not isinstance(value, bool):
            if isinstance(share, str) and not 0 <= value <= 1:
                message = f"expected a share from 0 to 1, but {share} is {show(value)}"
                document.report((*path, to), message)
            total += value
    if total > 1 + _TOLERANCE:
        document.report(path, f"the shares sum to {total:.6g}, more than 1", at_key=True)


def _check_model(document: Document, name: str, model: dict[str, Any]) -> None:
    path: Path = ("models", name)
    if "latency_ms" not in model:
        message = 'missing key "latency_ms" (how long a simulated step takes, in ms)'
        document.report(path, message, at_key=True)
    if model.get("verify") is True:
        message = "a simulated model has no choice of its own to compare tokens with: use another engine"
        document.report((*path, "verify"), message)
    trace = model.get("trace")
    if (
        isinstance(trace, str)
        and trace
        and trace_path(trace, document.spot((*path, "trace")).folders) is None
    ):
        document.report((*path, "trace"), f"no such file: {show(trace)}")
    if "trace" in model and "routing" in model:
        message = "the trace says where requests go: remove one of the two"
        document.report((*path, "routing"), message, at_key=True)
    elif "routing" in model:
        check_shares(document, (*path, "routing"), name, mapping(model["routing"]))
    elif "trace" not in model and "draw" not in document.data and destinations(document, name) != set():
        message = (
            'missing key "routing": a simulated model has no signals for its rules; say after what share of '
            "its steps the request goes to each model, as in routing: {llm: 0.35}"
        )
        document.report(path, message, at_key=True)
