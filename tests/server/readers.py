"""How load generators read streams: rules that their authors wrote down nowhere but in code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reading:
    """What a load generator notes of one request; ``latencies`` are chunk numbers in place of times."""

    text: str = ""
    first: int | None = None
    later: list[int] = field(default_factory=list)
    tokens: int | None = None
    finished: bool = False


def messages(body: bytes) -> Iterable[str]:
    """Events as ``vllm bench serve`` splits them: at blank lines, without comments."""
    for message in body.decode().split("\n\n"):
        if message.strip() and not message.startswith(":"):
            yield message.removeprefix("data: ")


def vllm_completions(body: bytes) -> Reading:
    """Backend ``openai``: the first chunk with choices is the first token, each later one an interval."""
    reading = Reading()
    for number, message in enumerate(messages(body)):
        if message == "[DONE]":
            reading.finished = True
            continue
        data = json.loads(message)
        if choices := data.get("choices"):
            if reading.first is None:
                reading.first = number
            else:
                reading.later.append(number)
            reading.text += choices[0].get("text") or ""
        elif usage := data.get("usage"):
            reading.tokens = usage["completion_tokens"]
    return reading


def vllm_chat(body: bytes) -> Reading:
    """Backend ``openai-chat``: the first chunk with content, or with none and without a role, is the first
    token."""
    reading = Reading()
    for number, message in enumerate(messages(body)):
        if message == "[DONE]":
            reading.finished = True
            continue
        data = json.loads(message)
        if choices := data.get("choices"):
            delta = choices[0]["delta"]
            content = delta.get("content")
            if reading.first is None:
                if content or (content == "" and "role" not in delta):
                    reading.first = number
            else:
                reading.later.append(number)
            reading.text += content or ""
        elif usage := data.get("usage"):
            reading.tokens = usage["completion_tokens"]
    return reading


def sglang_completions(body: bytes) -> Reading:
    """Backends ``sglang-oai`` and ``vllm``: every data line has a choice, and only those with text count."""
    reading = Reading()
    for number, line in enumerate(filter(None, body.decode().split("\n"))):
        chunk = line.removeprefix("data: ")
        if chunk == "[DONE]":
            reading.finished = True
            continue
        data: dict[str, Any] = json.loads(chunk)
        if data["choices"][0]["text"]:
            if reading.first is None:
                reading.first = number
            else:
                reading.later.append(number)
            reading.text += data["choices"][0]["text"]
            reading.tokens = (data.get("usage") or {}).get("completion_tokens", reading.tokens)
    return reading


def sglang_native(body: bytes) -> Reading:
    """Backend ``sglang``: text is all of the text so far, and the count is in ``meta_info``."""
    reading = Reading()
    for number, line in enumerate(filter(None, body.decode().split("\n"))):
        chunk = line.removeprefix("data: ")
        if chunk == "[DONE]":
            reading.finished = True
            continue
        data = json.loads(chunk)
        if data["text"]:
            if reading.first is None:
                reading.first = number
            elif data["meta_info"]["completion_tokens"] > (reading.tokens or 0):
                reading.later.append(number)
            reading.text = data["text"]
            reading.tokens = data["meta_info"]["completion_tokens"]
    return reading
