"""What a recipe says about batches: checks beyond their shape.

Works on raw data, and skips what is not there or has the wrong type, since the shape check reports that.
"""

from __future__ import annotations

from typing import Any

from tokenflow.dsl.meaning import mapping
from tokenflow.dsl.simulated import check_shares, destinations
from tokenflow.dsl.source import Document
from tokenflow.dsl.wording import Path, show, unknown_model


def check_batching(document: Document, models: dict[str, Any]) -> None:
    """Report thresholds that no policy reads, names that no model has, and plans that cannot be made."""
    batching = mapping(document.data.get("batching"))
    thresholds, policy = batching.get("thresholds"), batching.get("policy")
    if policy in ("auto", "planned", "lookahead", "eager") and thresholds:
        chooses = "waits for none" if policy == "eager" else "chooses its own"
        message = f'thresholds need "policy: fixed"; "{policy}" {chooses}'
        document.report(("batching", "thresholds"), message, at_key=True)
    for name in mapping(thresholds):
        if name not in models:
            document.report(("batching", "thresholds", name), unknown_model(name, models), at_key=True)
    assume = mapping(batching.get("assume"))
    for key, by_model in assume.items():
        for name, value in mapping(by_model).items():
            path: Path = ("batching", "assume", key, name)
            if name not in models:
                document.report(path, unknown_model(name, models), at_key=True)
            elif key == "routing":
                check_shares(document, path, name, mapping(value))
            elif key == "commits":
                for to in mapping(value):
                    if to not in models:
                        document.report((*path, to), unknown_model(to, models), at_key=True)
    if policy == "planned":
        _check_plannable(document, models, assume)


def _check_plannable(document: Document, models: dict[str, Any], assume: dict[str, Any]) -> None:
    for name, model in models.items():
        if mapping(model).get("engine") == "sim" and "trace" not in mapping(model):
            continue
        leads = destinations(document, name) != set() and "draw" not in document.data
        for key in ("latency_ms", "routing") if leads else ("latency_ms",):
            if name not in mapping(assume.get(key)):
                message = (
                    f'"planned" plans with what is assumed, and batching.assume.{key} says nothing of '
                    f'{show(name)}: add it (tokenflow plan --measure prints it), or let "auto" measure it'
                )
                document.report(("batching", "policy"), message)
