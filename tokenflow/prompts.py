"""What a request may say: prompts, sampling settings and parameters, checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any

import msgspec

from tokenflow.errors import InvalidRequest
from tokenflow.numeric import is_integer, is_number, plain
from tokenflow.text.tokenizer import Tokenizer, check_length
from tokenflow.types import MAX_PARAM, MAX_TOP_LOGPROBS, EndpointConfig, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text as is, token ids, or chat messages (rendered with the entry model's chat template)."""

_LONG_TEXT, _MANY_MESSAGES = 2_000, 50
"""Characters, and messages, from which a prompt is work."""
_MOST_MESSAGES = 4_096
_MANY = 2**15
"""Tokens that are looked at in a millisecond."""

_SETTINGS = tuple(field.name for field in fields(SamplingParams))
_FORMS = "a prompt is a text, a list of token ids or a list of chat messages"


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, float] | None = None) -> SamplingParams:
    """Sampling settings from keyword arguments; ``None`` means absent, and ``stop`` may be one string.

    :param defaults: the recipe's own settings, which count where nothing is given.
    :raises InvalidRequest: for an unknown name or a value out of range.
    """
    settings = {**(defaults or {}), **{name: value for name, value in given.items() if value is not None}}
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


def check_timeout(seconds: float | None) -> None:
    """A timeout, if any, is a positive number; :raises InvalidRequest: if not."""
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        raise InvalidRequest(f"timeout must be a positive number of seconds, got {seconds!r}", "timeout")


def check_many(prompts: object, concurrency: int) -> None:
    """Many prompts are answered some at a time; :raises InvalidRequest: if it is one, or none at a time."""
    if not is_integer(concurrency, least=1):
        raise InvalidRequest(
            f"concurrency must be an integer of at least 1, got {concurrency!r}", "concurrency"
        )
    if isinstance(prompts, str):
        raise InvalidRequest("generate_many takes a list of prompts, got one text", "prompts")


def check_top(top: int) -> None:
    """So many alternatives per token can be reported; :raises InvalidRequest: if not."""
    if not is_integer(top, least=0, below=MAX_TOP_LOGPROBS + 1):
        raise InvalidRequest(f"top must be an integer from 0 to {MAX_TOP_LOGPROBS}, got {top!r}", "logprobs")


def param_values(known: Mapping[str, float], given: Mapping[str, float] | None) -> tuple[float, ...]:
    """The value of every recipe parameter in recipe order; :raises InvalidRequest: for what is none."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"params must be a mapping, got {type(given).__name__}", "params")
    values = {name: plain(value) for name, value in given.items()}
    for name, value in values.items():
        if name not in known:
            raise InvalidRequest(
                f"the recipe has no parameter {name!r}; it has: {', '.join(known) or 'none'}",
                f"params.{name}",
            )
        if not is_number(value):
            raise InvalidRequest(
                f"parameter {name!r} must be a finite number, got {value!r:.40}", f"params.{name}"
            )
        if abs(value) > MAX_PARAM:
            raise InvalidRequest(
                f"parameter {name!r} must be from {-MAX_PARAM:g} to {MAX_PARAM:g}, as float32 can hold, got "
                f"{value!r:.40}",
                f"params.{name}",
            )
    return tuple(float(values.get(name, default)) for name, default in known.items())


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer,
    limit: int,
    *,
    chat: Tokenizer | None = None,
    add_special_tokens: bool = True,
    template: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> list[int]:
    """Token ids of a prompt.

    A text that spells the beginning-of-sequence token itself gets no second one.

    :param limit: ids from here on are not in every model's vocabulary.
    :param chat: writes messages, with its chat template; ``tokenizer`` if not given.
    :param add_special_tokens: put before a text what its model expects there.
    :param template: variables for the chat template.
    :param most: tokens that it can have.
    :raises ContextTooLong: if it has more.
    :raises InvalidRequest: if it is empty, none of the three forms, or has an id out of range.
    """
    if most is not None and not is_integer(most, least=0):
        raise InvalidRequest(f"most must be an integer of at least 0, got {most!r}", "most")
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one character", "prompt")
        tokens = tokenizer.encode(prompt, add_special_tokens, most)
        if tokenizer.bos_id is not None and tokens[:2] == [tokenizer.bos_id] * 2:
            del tokens[0]
        return _known(tokens, limit)
    if not isinstance(prompt, list | tuple):
        raise InvalidRequest(f"{_FORMS}, got {type(prompt).__name__}", "prompt")
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token or message", "prompt")
    if isinstance(prompt[0], Mapping):
        if len(prompt) > _MOST_MESSAGES:
            raise InvalidRequest(
                f"a conversation can have {_MOST_MESSAGES} messages at most, got {len(prompt)}", "prompt"
            )
        messages = [_message(index, item) for index, item in enumerate(prompt)]
        return _known((chat or tokenizer).render(messages, template, most), limit)
    check_length(len(prompt), most)
    return _ids(prompt, limit)


def is_long(prompt: Prompt) -> bool:
    """Whether it is work to make tokens of a prompt: more than a fraction of a millisecond."""
    if isinstance(prompt, str):
        return len(prompt) > _LONG_TEXT
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[0], Mapping):
        return False
    if len(prompt) > _MANY_MESSAGES:
        return True
    contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
    parts = (part for content in contents for part in (content if isinstance(content, list) else [content]))
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return sum(len(text) for text in texts if isinstance(text, str)) > _LONG_TEXT


def _ids(prompt: Sequence[Any], limit: int) -> list[int]:
    """A copy of a prompt of token ids that every model of the recipe has."""
    try:
        # Both checks in one pass: a prompt may have hundreds of thousands, and everybody waits.
        ids: list[int] = msgspec.convert(prompt, _ids_below(limit))
    except msgspec.ValidationError:
        for index, token in enumerate(prompt):
            if type(token) is not int:
                raise InvalidRequest(
                    f"{_FORMS}, got {type(token).__name__} at index {index}", "prompt"
                ) from None
        return _known(list(prompt), limit)
    return ids


@cache
def _ids_below(limit: int) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=limit)]]


def _known(tokens: list[int], limit: int) -> list[int]:
    """The tokens, if every model of the recipe has them."""
    for start in range(0, len(tokens), _MANY):
        part = tokens[start : start + _MANY]  # between two of which other threads get a turn
        if min(part) < 0 or max(part) >= limit:
            index, token = next((i, token) for i, token in enumerate(tokens) if not 0 <= token < limit)
            raise InvalidRequest(
                f"token id {token} at index {index} is out of range: the tokenizer has {limit} ids",
                "prompt",
            )
    return tokens


def _message(index: int, message: object) -> dict[str, Any]:
    """A chat message; text in parts becomes one text, and an assistant may have said nothing."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"message {index} must be a mapping, got {type(message).__name__}", "prompt")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"message {index} needs a 'role'", "prompt")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(index, part) for part in content)
    elif content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise InvalidRequest(
            f"message {index}: content must be a text or text parts, got {type(content).__name__}", "prompt"
        )
    return {**message, "content": content}


def _part(index: int, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f"message {index}: content parts must be {{'type': 'text', 'text': ...}}", "prompt"
        )
    return text


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
