"""What a model behind an endpoint cannot do: it shows no logits, only the best tokens' log-probabilities."""

from __future__ import annotations

from typing import Any, cast

from tokenflow.dsl.meaning import Meaning, mapping
from tokenflow.dsl.source import Document
from tokenflow.dsl.tree import walk
from tokenflow.endpoints import can_try_again
from tokenflow.types import EndpointConfig, ModelConfig

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
        if document.data.get("scorer") == name:
            message = "an endpoint does not score prompts: name a model that runs here, or leave it out"
            document.report(("scorer",), message)
        if mapping(document.data.get("sampling")).get("repetition_penalty", 1) != 1:
            message = f"{name} runs behind an endpoint, which gives no logits to penalise: leave it out"
            document.report(("sampling", "repetition_penalty"), message)
        _check_times(document, name, config, mapping(endpoint))
        listed = mapping(endpoint).get("top_logprobs", EndpointConfig(base_url="").top_logprobs)
        if isinstance(listed, int):
            _check_signals(document, name, listed, meaning)


def _check_times(document: Document, name: str, config: dict[str, Any], endpoint: dict[str, Any]) -> None:
    step = config.get("step_timeout", ModelConfig().step_timeout)
    call = endpoint.get("timeout_s", EndpointConfig(base_url="").timeout_s)
    if isinstance(step, int | float) and isinstance(call, int | float) and not can_try_again(call, step):
        path, key = ("models", name, "endpoint", "timeout_s"), "timeout_s" in endpoint
        message = f"a call of {call:g} s leaves a step of {step:g} s (step_timeout) no time to try again"
        document.report(path if key else ("models", name, "step_timeout"), message)


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
