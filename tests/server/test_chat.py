"""Chats over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served
from tokenflow.server.requests import Chat, Tokenize, decode

pytestmark = pytest.mark.anyio

LONG = {"role": "user", "content": "é" * 2000}
MESSAGES = [{"role": "user", "content": "93*7=?"}]


async def test_an_answer_has_what_openais_has_and_says_who_wrote_it(pair: Served) -> None:
    answer = await pair.chat("93*7=?", max_tokens=30)
    direct = await pair.service.router.generate(MESSAGES, max_tokens=30)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": direct.text},
            "logprobs": None,
            "finish_reason": direct.finish_reason,
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == direct.usage.prompt_tokens
    assert answer["usage"]["completion_tokens"] == direct.usage.completion_tokens
    assert answer["tokenflow"]["tokens"] == direct.usage.by_model


@pytest.mark.parametrize(
    "settings", [{}, {"n": 2, "seed": 1, "temperature": 1.0}, {"logprobs": True, "top_logprobs": 2}]
)
async def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(
    pair: Served, settings: dict[str, Any]
) -> None:
    settings = {"max_tokens": 20, "return_models": True, "return_token_ids": True, **settings}
    whole = await pair.chat("93*7=?", **settings)
    *events, last = await pair.chat("93*7=?", stream=True, stream_options={"include_usage": True}, **settings)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [
        whole["prompt_token_ids"]
    ]
    for choice in whole["choices"]:
        opening, *parts = [
            part for event in events for part in event["choices"] if part["index"] == choice["index"]
        ]
        assert opening["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in part["delta"] for part in parts)
        assert len(parts) == len(choice["token_ids"])
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [m for part in parts for m in part["tokenflow"]["models"]] == choice["tokenflow"]["models"]
        if choice["logprobs"] is not None:
            entries = [entry for part in parts for entry in part["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]


async def test_a_stream_has_no_usage_unless_it_is_asked_for(pair: Served) -> None:
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        events = await pair.chat("93*7=?", stream=True, max_tokens=5, **options)
        assert all(event["choices"] and "usage" not in event for event in events)


async def test_logprobs_say_which_model_wrote_each_token(pair: Served) -> None:
    answer = await pair.chat("93*7=?", max_tokens=20, logprobs=True, top_logprobs=3)
    direct = await pair.service.router.generate(MESSAGES, max_tokens=20, logprobs=True, top_logprobs=3)
    entries = answer["choices"][0]["logprobs"]["content"]
    for entry, token in zip(entries, direct.tokens, strict=True):
        assert entry["logprob"] == token.logprob
        assert entry["model"] == token.model
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [t.logprob for t in token.top_logprobs]
    bare = await pair.chat("93*7=?", max_tokens=2, logprobs=True)
    assert [entry["top_logprobs"] for entry in bare["choices"][0]["logprobs"]["content"]] == [[], []]


async def test_the_newer_name_of_a_limit_wins(pair: Served) -> None:
    reply = await pair.post("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 0})
    assert (reply.status, reply.error["param"]) == (400, "max_completion_tokens")
    answer = await pair.chat("a", max_tokens=9, max_completion_tokens=4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4
    unlimited = await pair.chat("a", ignore_eos=True)
    assert unlimited["usage"]["total_tokens"] == 1024


async def test_parts_of_text_are_one_text_and_their_other_keys_are_ignored(pair: Served) -> None:
    plain = await pair.chat("93*7=?", max_tokens=10)
    parts = [
        {"type": "text", "text": "93*", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "7=?"},
    ]
    message = {"role": "user", "content": parts, "name": None}
    reply = await pair.post("/v1/chat/completions", {"messages": [message], "max_tokens": 10})
    assert reply.json["choices"] == plain["choices"]


async def test_the_last_message_may_be_gone_on_with(pair: Served) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "90*7=6"}]
    body = {"messages": messages, "max_tokens": 10, "return_token_ids": True}
    reply = await pair.post("/v1/chat/completions", {**body, "continue_final_message": True})
    tokenizer = pair.service.router.tokenizer
    assert tokenizer.decode(reply.json["prompt_token_ids"]).endswith("A: 90*7=6")
    closed = await pair.post("/v1/chat/completions", body)
    assert tokenizer.decode(closed.json["prompt_token_ids"]).endswith("A: ")
    both = await pair.post(
        "/v1/chat/completions", {**body, "continue_final_message": True, "add_generation_prompt": True}
    )
    assert both.status == 400


async def test_variables_reach_the_chat_template(pair: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    plain = (await pair.post("/v1/chat/completions", body)).json["prompt_token_ids"]
    more = {"chat_template_kwargs": {"bos_token": "~", "enable_thinking": False}}
    changed = (await pair.post("/v1/chat/completions", {**body, **more})).json["prompt_token_ids"]
    assert changed[1:] == plain[1:]
    assert changed[0] != plain[0]
    ours = {"chat_template_kwargs": {"messages": [], "self": 1, "variables": 2, "most": 3}}
    assert (await pair.post("/v1/chat/completions", {**body, **ours})).json["prompt_token_ids"] == plain


@pytest.mark.parametrize("shape", [Chat, Tokenize])
def test_numbers_for_the_chat_template_are_as_they_are_written(shape: type[Chat | Tokenize]) -> None:
    asked = decode(
        b'{"messages": [{"role": "user", "content": "a", "x": [1.0, 1, 1e2]}], "n": 2.0,'
        b' "chat_template_kwargs": {"low": 1.0, "high": 1e400, "whole": 3}}',
        shape,
    )
    assert repr(asked.messages) == "[{'role': 'user', 'content': 'a', 'x': [1.0, 1, 100.0]}]"
    assert repr(asked.chat_template_kwargs) == "{'low': 1.0, 'high': inf, 'whole': 3}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_variables_that_the_chat_template_does_not_take_are_blamed(pair: Served, path: str) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"bos_token": 1}}
    reply = await pair.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")
    assert "does not accept these variables: TypeError" in reply.error["message"]
    reply = await pair.post(path, {"messages": [{"role": "user", "content": 3}]})
    assert (reply.status, reply.error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        ({}, "invalid_value", "messages", "messages is missing"),
        ({"messages": []}, "invalid_value", "messages", "messages must not be empty"),
        ({"messages": "hi"}, "invalid_value", "messages", "messages: expected array, got str"),
        ({"messages": ["hi"]}, "invalid_value", "messages[0]", "messages[0]: expected object, got str"),
        ({"messages": [{"content": "a"}]}, "invalid_value", "messages", "message 0 needs a 'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, "invalid_value", "messages", "content must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "invalid_value",
            "messages",
            "content parts must be",
        ),
        ({"messages": MESSAGES, "top_logprobs": 2}, "invalid_value", "top_logprobs", "needs logprobs: true"),
        ({"messages": MESSAGES, "logprobs": 1}, "invalid_value", "logprobs", "expected bool, got int"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "unsupported_parameter", "tools", "is not"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "unsupported_parameter", "tool_choice", "is not"),
        ({"messages": MESSAGES, "echo": True}, "unsupported_parameter", "echo", "echo is not supported"),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {}}},
            "unsupported_parameter",
            "response_format",
            "response_format is not supported",
        ),
        ({"messages": MESSAGES * 4097}, "invalid_value", "messages", "can have 4096 messages at most"),
        ({"messages": [LONG]}, "context_length_exceeded", "messages", "the recipe's smallest context"),
    ],
)  # fmt: skip
async def test_a_wrong_request_is_told_what_is_wrong(
    pair: Served, body: dict[str, Any], code: str, param: str, message: str
) -> None:
    reply = await pair.post("/v1/chat/completions", body)
    assert (reply.status, reply.error["code"]) == (400, code), reply.body
    assert reply.error["param"] == param
    assert message in reply.error["message"]


async def test_what_asks_for_nothing_is_accepted(pair: Served) -> None:
    for more in (
        {"tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"tools": None, "functions": None, "modalities": ["text"], "parallel_tool_calls": True},
    ):
        assert (await pair.chat("a", max_tokens=1, **more))["choices"]
