"""What a request may say: prompts, sampling settings and parameters, checked before anything runs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from tokenflow.errors import InvalidRequest
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.types import EndpointConfig, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text as is, token ids, or chat messages (rendered with the entry model's chat template)."""

_SETTINGS = tuple(field.name for field in fields(SamplingParams))
_FORMS = "a prompt is a text, a list of token ids or a list of chat messages"


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling settings from keyword arguments; ``None`` means absent, and ``stop`` may be one string.

    :raises InvalidRequest: for an unknown name or a value out of range.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    for name in settings:
        if name not in _SETTINGS:
            close = difflib.get_close_matches(name, _SETTINGS, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise InvalidRequest(f"unknown sampling setting {name!r}{hint}", name)
    for name in ("stop", "stop_token_ids"):
        value = settings.get(name, ())
        if isinstance(value, str):
            value = (value,)
        if not isinstance(value, list | tuple):
            raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}", name)
        settings[name] = tuple(value)
    params = SamplingParams(**settings)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens {params.min_tokens} exceeds max_tokens {params.max_tokens}", "min_tokens"
        )
    return params


def check_known_ids(params: SamplingParams, limit: int) -> None:
    """Ids that settings name must be in the vocabulary; :raises InvalidRequest: if one is not."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if token >= limit:
                raise InvalidRequest(
                    f"{name} names token id {token}, but the tokenizer has {limit} ids", name
                )


def param_values(known: Mapping[str, float], given: Mapping[str, float] | None) -> tuple[float, ...]:
    """The value of every recipe parameter in recipe order; :raises InvalidRequest: for what is none."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"params must be a mapping, got {type(given).__name__}", "params")
    for name, value in given.items():
        if name not in known:
            raise InvalidRequest(
                f"the recipe has no parameter {name!r}; it has: {', '.join(known) or 'none'}",
                f"params.{name}",
            )
        if not isinstance(value, int | float) or isinstance(value, bool) or not _finite(value):
            raise InvalidRequest(
                f"parameter {name!r} must be a finite number, got {value!r:.40}", f"params.{name}"
            )
    return tuple(float(given.get(name, default)) for name, default in known.items())


def encode(prompt: Prompt, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Token ids of a prompt.

    :param limit: ids from here on are in no vocabulary.
    :raises InvalidRequest: if it is empty, none of the three forms, or has an id out of range.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one character", "prompt")
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list | tuple):
        raise InvalidRequest(f"{_FORMS}, got {type(prompt).__name__}", "prompt")
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token or message", "prompt")
    if isinstance(prompt[0], Mapping):
        return tokenizer.render([_message(index, item) for index, item in enumerate(prompt)])
    for index, token in enumerate(prompt):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequest(f"{_FORMS}, got {type(token).__name__} at index {index}", "prompt")
        if not 0 <= token < limit:
            raise InvalidRequest(
                f"token id {token} at index {index} is out of range: the tokenizer has {limit} ids", "prompt"
            )
    return list(cast(Sequence[int], prompt))


def _message(index: int, message: object) -> dict[str, Any]:
    """A chat message; text in parts becomes one text."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"message {index} must be a mapping, got {type(message).__name__}", "prompt")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"message {index} needs a 'role'", "prompt")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
                raise InvalidRequest(
                    f"message {index}: content parts must be {{'type': 'text', 'text': ...}}", "prompt"
                )
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        raise InvalidRequest(
            f"message {index}: content must be a text or text parts, got {type(content).__name__}", "prompt"
        )
    return {**message, "content": content}


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_endpoints(sampling: SamplingParams, endpoints: Mapping[str, EndpointConfig]) -> None:
    """Refuse what cannot be had from models behind ``endpoints``, which list their best tokens only.

    :raises InvalidRequest: naming the field and the model.
    """
    for model, endpoint in endpoints.items():
        listed = endpoint.top_logprobs
        where = f"model {model!r} runs behind an endpoint, which"
        if sampling.repetition_penalty != 1:
            raise InvalidRequest(f"{where} gives no logits to penalise", "repetition_penalty")
        if not sampling.greedy and listed < 2:
            raise InvalidRequest(
                f"{where} lists {listed} token(s) to draw from: ask for temperature 0", "temperature"
            )
        if sampling.logprobs and not listed:
            raise InvalidRequest(f"{where} lists no log-probabilities", "logprobs")
        if sampling.top_logprobs > listed:
            raise InvalidRequest(f"{where} lists {listed} token(s) per position", "top_logprobs")
