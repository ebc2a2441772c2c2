"""The openai SDK, as it is, against a server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from anyio import to_thread

from tests.recipes import toy_pair
from tests.server.conftest import Served, mortal, serving
from tokenflow.server.service import State

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "93*7=?"}]


@pytest.fixture
async def sdk(pair: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{pair.port}/v1", api_key="x") as client:
        yield client


async def test_chats_whole_and_streamed(pair: Served, sdk: openai.AsyncOpenAI) -> None:
    direct = await pair.service.router.generate(MESSAGES, max_tokens=30)
    answer = await sdk.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=30)
    assert answer.choices[0].message.content == direct.text
    assert answer.usage is not None and answer.usage.completion_tokens == len(direct.tokens)
    assert (
        answer.model_extra is not None and answer.model_extra["tokenflow"]["tokens"] == direct.usage.by_model
    )
    stream = await sdk.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == direct.text
    assert chunks[-1].usage == answer.usage


async def test_completions_whole_and_streamed(pair: Served, sdk: openai.AsyncOpenAI) -> None:
    direct = await pair.service.router.generate("93*7=?", max_tokens=30)
    answer = await sdk.completions.create(model="toy", prompt="93*7=?", max_tokens=30, logprobs=2)
    assert answer.choices[0].text == direct.text
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs is not None
    stream = await sdk.completions.create(model="toy", prompt="93*7=?", max_tokens=30, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == direct.text


async def test_the_synchronous_client(pair: Served) -> None:
    direct = await pair.service.router.generate(MESSAGES, max_tokens=20)

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{pair.port}/v1", api_key="x") as client:
            whole = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=20)
            with client.chat.completions.create(
                model="toy", messages=MESSAGES, max_tokens=20, stream=True
            ) as stream:
                pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert await to_thread.run_sync(ask) == (direct.text, direct.text)


async def test_our_own_keys_and_logprobs_pass_through(pair: Served, sdk: openai.AsyncOpenAI) -> None:
    extra = {"params": {"tau": 0.2}, "return_models": True, "top_k": 5}
    answer = await sdk.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=10, logprobs=True, top_logprobs=2, extra_body=extra
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert choice.model_extra is not None
    models = choice.model_extra["tokenflow"]["models"]
    entries = choice.logprobs.content
    assert [entry.model_extra["model"] for entry in entries if entry.model_extra] == models
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


async def test_models_are_listed_and_retrieved_by_names_with_a_slash(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["toy", "toy/slm", "toy/llm"]
    assert (await sdk.models.retrieve("toy/llm")).id == "toy/llm"
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.models.retrieve("toy/xl")
    assert caught.value.code == "model_not_found"


async def test_what_is_wrong_is_raised_as_what_it_is(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.completions.create(model="toy", prompt="a", temperature=-1)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    assert "temperature must be at least 0, got -1" in caught.value.message


async def test_the_sdk_tries_again_while_the_server_is_not_ready(
    pair: Served, sdk: openai.AsyncOpenAI
) -> None:
    asked = await pair.metric("request_failure_total", code="not_ready")
    pair.service.state = State.STARTING
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.with_options(max_retries=2).completions.create(model="toy", prompt="a")
    finally:
        pair.service.state = State.SERVING
    assert (caught.value.status_code, caught.value.code) == (503, "not_ready")
    assert await pair.metric("request_failure_total", code="not_ready") == asked + 3


async def test_the_sdk_does_not_repeat_what_a_recipe_will_always_fail_at(
    pair: Served, sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenflow.errors import RouteFailed

    calls = 0

    async def fail(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        raise RouteFailed("it bounces")

    monkeypatch.setattr("tokenflow.server.completions.prepare", fail)
    with pytest.raises(openai.InternalServerError) as caught:
        await sdk.completions.create(model="toy", prompt="a")
    assert (caught.value.code, calls) == ("recipe_error", 1)


async def test_a_stream_that_fails_raises_after_what_came(tmp_path: Path) -> None:
    recipe = mortal(toy_pair(tmp_path, slm={"raise_at_step": 8}, llm={"raise_at_step": 8}))
    async with serving(recipe) as served:
        base = f"http://127.0.0.1:{served.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x") as client:
            stream = await client.completions.create(model="toy", prompt="ab", max_tokens=200, stream=True)
            pieces: list[str] = []
            with pytest.raises(openai.APIError) as caught:
                async for chunk in stream:
                    pieces += chunk.choices[0].text
    assert pieces
    assert caught.value.code == "worker_died"
    assert "the toy engine raises" in caught.value.message


async def test_many_at_once_get_their_own_answers(pair: Served, sdk: openai.AsyncOpenAI) -> None:
    prompts = [f"{n}*7=?" for n in range(20)]
    answers = await asyncio.gather(
        *(sdk.completions.create(model="toy", prompt=prompt, max_tokens=10) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.choices[0].text == (await pair.service.router.generate(prompt, max_tokens=10)).text
