"""What a model behind an endpoint cannot do: it shows no logits, only the best tokens' log-probabilities."""

from __future__ import annotations

from typing import Any, cast

from tokenflow.dsl.meaning import Meaning, mapping
from tokenflow.dsl.source import Document
from tokenflow.dsl.tree import walk
from tokenflow.types import EndpointConfig

_LISTED = {"entropy": None, "entropy_nats": None, "confidence": 1, "logprob": 1, "margin": 2}
"""How many listed tokens a signal needs; None where all tokens are needed."""


def check_endpoints(document: Document, models: dict[str, Any], meaning: Meaning) -> None:
    """Report what a recipe asks of models behind endpoints that they cannot give."""
    for name, model in models.items():
        config = mapping(model)
        endpoint = config.get("endpoint")
        if config.get("engine") != "openai":
            if endpoint is not None:
                message = 'an endpoint needs "engine: openai"'
                document.report(("models", name, "endpoint"), message, at_key=True)
            continue
        if endpoint is None:
            message = 'engine "openai" needs "endpoint: {base_url: http://...}"'
            document.report(("models", name, "engine"), message)
        if config.get("verify") is True:
            message = "an endpoint gives the log-probabilities of the next token only: it cannot check tokens"
            document.report(("models", name, "verify"), message)
        if name in document.python and document.python[name].routes:
            message = "a route in Python sees logits, which an endpoint does not give: write rules instead"
            document.report(("models", name), message, at_key=True)
        for head, owner in meaning.owners.items():
            if owner == name:
                message = f"it reads states of {name}, which runs behind an endpoint and does not show them"
                document.report(("heads", head), message, at_key=True)
        listed = mapping(endpoint).get("top_logprobs", EndpointConfig(base_url="").top_logprobs)
        if isinstance(listed, int):
            _check_signals(document, name, listed, meaning)


def _check_signals(document: Document, model: str, listed: int, meaning: Meaning) -> None:
    for (name, index), tree in meaning.conditions.items():
        if name != model:
            continue
        signals = {cast(str, arguments[0]) for node, *arguments in walk(tree) if node == "signal"}
        for signal in sorted(signals & _LISTED.keys()):
            needed = _LISTED[signal]
            if needed is None:
                message = (
                    f'"{signal}" needs the probability of every token, and an endpoint lists the best ones: '
                    "use confidence, margin or logprob"
                )
            elif needed > listed:
                message = f'"{signal}" needs endpoint.top_logprobs of {needed} or more, it is {listed}'
            else:
                continue
            document.report(("routes", name, index, "when"), message)
