"""What is long is not done by the event loop, where everybody's tokens would wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Served
from tokenflow.server import chat, completions, generation, native, reading, service, tokens

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50, 60]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[bool]]:
    """Watch a function: whether each of its calls was made in another thread than the event loop's."""
    loop = threading.current_thread()

    def watch(module: Any, name: str) -> list[bool]:
        seen: list[bool] = []
        work = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            seen.append(threading.current_thread() is not loop)
            return work(*args, **options)

        monkeypatch.setattr(module, name, watched)
        return seen

    return watch


@pytest.fixture
def everything_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (completions, generation, native, service, tokens):
        monkeypatch.setattr(module, "LONG", 3)


async def test_a_large_body_is_read_beside_the_event_loop(
    pair: Served, beside: Callable[[Any, str], list[bool]]
) -> None:
    seen = beside(reading, "decode")
    await pair.complete(PROMPT, max_tokens=2)
    assert seen == [False]
    long = [5] * 100_000
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": [long] * 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "7" * 100_000}]}),
        ("/generate", {"input_ids": long}),
        ("/detokenize", {"tokens": long}),
        ("/tokenize", {"prompt": "7" * 100_000}),
    ):
        seen.clear()
        reply = await pair.post(path, body)
        assert reply.status == 200 or reply.error["code"] == "context_length_exceeded", reply.body
        assert seen == [True], path


@pytest.mark.usefixtures("everything_is_long")
async def test_long_answers_are_written_beside_the_event_loop(
    pair: Served, beside: Callable[[Any, str], list[bool]]
) -> None:
    whole, echo, inputs = (
        beside(generation, "_encoded"),
        beside(completions, "text_logprobs"),
        beside(native, "Logprobs"),
    )
    answer = await pair.complete(PROMPT, max_tokens=12, logprobs=2, echo=True)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(PROMPT) + 12
    assert whole == [True]
    assert echo == [True, True]  # of the prompt, and of the output in the answer
    await pair.chat("93*7=?", max_tokens=12, logprobs=True)
    assert whole == [True, True]
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0}
    reply = await pair.post("/generate", {**body, "sampling_params": {"max_new_tokens": 12}})
    assert len(reply.json["meta_info"]["input_token_logprobs"]) == len(PROMPT)
    assert inputs.count(True) == 1
    assert whole == [True, True, True]
    assert (await pair.post("/detokenize", {"tokens": PROMPT})).status == 200


async def test_an_event_of_a_long_stream_writes_only_what_is_new(
    pair: Served, beside: Callable[[Any, str], list[bool]]
) -> None:
    """SGLang's streams repeat all tokens so far, with all their log-probabilities."""
    spelled = beside(native, "number")
    settings = {"max_new_tokens": 50, "ignore_eos": True}
    body = {"input_ids": PROMPT, "return_logprob": True, "stream": True, "sampling_params": settings}
    events = (await pair.post("/generate", body)).events
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == list(range(1, 51))
    assert len(spelled) == 50


async def test_most_events_of_a_stream_are_encoded_once(
    pair: Served, beside: Callable[[Any, str], list[bool]]
) -> None:
    """Only the first and the last differ from the others in more than their text."""
    prompt: dict[str, Any]
    for path, prompt, module in (
        ("/v1/completions", {"prompt": PROMPT}, completions),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}, chat),
    ):
        made = beside(module, "Choice")
        plain = {**prompt, "max_tokens": 40, "ignore_eos": True, "stream": True, "n": 2}
        events = (await pair.post(path, plain)).events
        few = len(made)
        named = (await pair.post(path, {**plain, "return_models": True})).events
        assert few < 12 and len(made) - few >= 80
        for event, other in zip(texts(events), texts(named), strict=True):
            other.pop("tokenflow", None)
            assert event == other


def texts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, response by response."""
    choices = [choice for event in events for choice in event["choices"]]
    return sorted(choices, key=lambda choice: int(choice["index"]))
