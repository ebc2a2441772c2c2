"""What clients may ask: requests as they are written in JSON, checked for shape.

Absent and ``null`` are the same.  Keys that nobody knows are ignored; known ones that would change the answer
and are not supported are refused.  Ranges of values are checked where they are used, in
:class:`tokenflow.types.SamplingParams`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from tokenflow.server.errors import invalid, too_many, unsupported

T = TypeVar("T", bound=Struct)

MOST_VALUES = 2**18
"""Values in a body: reading more of them would keep everybody's tokens waiting."""

_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
}
Item = Annotated[
    Any,
    Meta(
        description="a text, a token id, or a list of token ids; all items are of one kind",
        extra_json_schema={"anyOf": [{"type": "string"}, {"type": "integer"}, _INTEGERS]},
    ),
]
Message = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["system", "user", "assistant"]},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
            },
        }
    ),
]


class StreamOptions(Struct, frozen=True):
    """What a stream contains."""

    include_usage: bool | None = None


class Generation(Struct, frozen=True, kw_only=True):
    """What completions and chats have in common: OpenAI's keys, vLLM's, and ours."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    params: Annotated[dict[str, float] | None, Meta(description="the recipe's parameters")] = None
    return_models: Annotated[
        bool | None, Meta(description="name the model that wrote each token, in each choice")
    ] = None

    def sampling(self) -> dict[str, Any]:
        """The settings that a router knows by the same names."""
        return {name: getattr(self, name) for name in SAMPLING}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Completions(Generation, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Item]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class Chat(Generation, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template(self) -> dict[str, Any]:
        """Variables for the chat template."""
        return chat_variables(self)


class Generate(Struct, frozen=True, kw_only=True):
    """POST /generate, as SGLang has it."""

    text: str | list[str] | None = None
    input_ids: list[Item] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    params: dict[str, float] | None = None


class Tokenize(Struct, frozen=True, kw_only=True):
    """POST /tokenize: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


SAMPLING = (
    "max_tokens temperature top_p top_k min_p seed stop stop_token_ids presence_penalty frequency_penalty "
    "repetition_penalty logit_bias min_tokens ignore_eos skip_special_tokens"
).split()
"""Settings that a router knows by the same names."""


def chat_variables(request: Chat | Tokenize) -> dict[str, Any]:
    """What the chat template is told beside the messages."""
    given = {
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    return {
        **(request.chat_template_kwargs or {}),
        **{name: value for name, value in given.items() if value is not None},
    }


def _never(value: Any) -> bool:
    return False


def _off(value: Any) -> bool:
    """Whether a value turns something off that is off."""
    return value is False or value in ("", [], {}) or (value == 0 and isinstance(value, int | float))


def _among(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(known) and value == known for known in values)


def _plain_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


Neutral = Mapping[str, Callable[[Any], bool]]

_REFUSED: Neutral = {
    # OpenAI
    "best_of": _among(1),
    "suffix": _off,
    "tools": _off,
    "tool_choice": _among("none", "auto"),
    "functions": _off,
    "function_call": _among("none", "auto"),
    "response_format": _plain_text,
    "modalities": _among(["text"]),
    "audio": _never,
    "web_search_options": _never,
    # vLLM
    "use_beam_search": _off,
    "length_penalty": _among(1, 1.0),
    "include_stop_str_in_output": _off,
    "bad_words": _off,
    "allowed_token_ids": _never,
    "prompt_logprobs": _never,
    "truncate_prompt_tokens": _never,
    "logits_processors": _off,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _never,
    "guided_grammar": _never,
    "structured_outputs": _never,
    "prompt_embeds": _never,
    "chat_template": _never,
    "documents": _off,
    "logprob_token_ids": _never,
    "spaces_between_special_tokens": _among(True),
    "repetition_detection": _off,
    "thinking_token_budget": _never,
    "kv_transfer_params": _off,
    # SGLang
    "json_schema": _never,
    "regex": _never,
    "ebnf": _never,
    "structural_tag": _never,
    "stop_regex": _off,
    "no_stop_trim": _off,
    "lora_path": _off,
    "return_hidden_states": _off,
    "session_params": _off,
    "image_data": _off,
    "audio_data": _off,
    "video_data": _off,
    "token_ids_logprob": _off,
    "return_entropy": _off,
    "return_routed_experts": _off,
    "input_embeds": _never,
    "custom_logit_processor": _never,
}
"""Known keys that are not supported, and whether a value of theirs changes nothing."""

_CHAT_REFUSED: Neutral = {
    **_REFUSED,
    "echo": _off,
    "add_special_tokens": _off,
    "prompt": _never,
    "input_ids": _never,
    "mm_processor_kwargs": _off,
}

_STREAM_REFUSED: Neutral = {"continuous_usage_stats": _off}


def _number(written: str) -> int | float:
    """A number with a point or an exponent; it is an integer if its value is one, as JSON Schema has it."""
    value = float(written)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


class _AsWritten(Struct, frozen=True):
    """What a chat template sees, where ``1.0`` is not ``1``."""

    messages: Any = None
    chat_template_kwargs: Any = None


_JSON = msgspec.json.Decoder(float_hook=_number)
_AS_WRITTEN = msgspec.json.Decoder(_AsWritten, float_hook=float)


def decode(body: bytes, shape: type[T]) -> T:
    """A request's body as what it should be.

    :raises ApiError: for what is not JSON, has the wrong shape, or asks for what is not supported.
    """
    # Commas in texts count as well; a text with so many is too long for any prompt.
    if body.count(b",") > MOST_VALUES:
        raise too_many(MOST_VALUES)
    try:
        data = _JSON.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object")
    if seen := data.keys() & _AsWritten.__struct_fields__:
        written = _AS_WRITTEN.decode(body)
        data |= {name: getattr(written, name) for name in seen}
    refuse(data, _CHAT_REFUSED if shape is Chat else _REFUSED)
    options = data.get("stream_options")
    if isinstance(options, dict):
        refuse(options, _STREAM_REFUSED, "stream_options.")
    asked = convert(data, shape)
    if isinstance(asked, Generation) and asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    return asked


def refuse(data: Mapping[str, Any], refused: Neutral = _REFUSED, within: str = "") -> None:
    """Refuse what is known, would change the answer, and is not supported; :raises ApiError: naming it."""
    for name in data.keys() & refused.keys():
        value = data[name]
        if value is not None and not refused[name](value):
            raise unsupported(within + name)


def convert(
    data: Mapping[str, Any], shape: type[T], within: str = "", names: Mapping[str, str] = MappingProxyType({})
) -> T:
    """JSON data as what it should be.

    :param within: where in the request the data is, for errors: ``sampling_params.`` say.
    :param names: what the client calls keys that have other names here.
    :raises ApiError: for what has the wrong shape.
    """
    try:
        return msgspec.convert(data, shape, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong_shape(str(error), within, names) from None


def _wrong_shape(message: str, within: str, names: Mapping[str, str]) -> Exception:
    """``Expected `int | null`, got `str` - at `$.max_tokens` ``, in plain words."""
    found = re.fullmatch(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", message, re.DOTALL)
    assert found is not None
    what, where = found[1].replace(" | null", "").replace("`", ""), (found[2] or "").replace("[...]", "[]")
    if where:
        key = where.partition("[")[0].partition(".")[0]
        where = within + names.get(key, key) + where[len(key) :]
    if missing := re.fullmatch(r"Object missing required field (\w+)", what):
        name = f"{where}.{missing[1]}" if where else missing[1]
        return invalid(f"{name} is missing", name)
    return invalid(f"{where}: {what[:1].lower()}{what[1:]}" if where else what, where or None)
