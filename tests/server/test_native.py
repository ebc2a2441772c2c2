"""SGLang's own endpoints."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.server.conftest import Served

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50, 60]
TEXT = "Q: 93*7=?"


async def generate(pair: Served, **body: Any) -> Any:
    reply = await pair.post("/generate", body)
    assert reply.status == 200, reply.body
    return reply.events if body.get("stream") else reply.json


async def test_one_prompt_gets_one_answer_with_its_figures(pair: Served) -> None:
    for prompt, given in ((TEXT, {"text": TEXT}), (PROMPT, {"input_ids": PROMPT})):
        answer = await generate(pair, **given, sampling_params={"max_new_tokens": 20}, rid="abc")
        direct = await pair.service.router.generate(prompt, max_tokens=20)
        assert answer["text"] == direct.text
        assert answer["output_ids"] == direct.token_ids
        meta = answer["meta_info"]
        assert meta["id"] == "abc"
        assert meta["prompt_tokens"] == direct.usage.prompt_tokens
        assert meta["completion_tokens"] == len(direct.tokens)
        if direct.finish_reason == "length":
            assert meta["finish_reason"] == {"type": "length", "length": 20}
        else:
            assert meta["finish_reason"] == {"type": "stop", "matched": 2}
        assert meta["tokenflow"]["tokens"] == direct.usage.by_model


async def test_a_list_of_prompts_gets_a_list_of_answers(pair: Served) -> None:
    answers = await generate(pair, text=[TEXT, "ab"], sampling_params={"max_new_tokens": 5})
    expected = [(await pair.service.router.generate(p, max_tokens=5)).text for p in (TEXT, "ab")]
    assert [answer["text"] for answer in answers] == expected
    assert len({answer["meta_info"]["id"] for answer in answers}) == 2
    twice = await generate(pair, text="ab", sampling_params={"max_new_tokens": 5, "n": 2})
    assert [answer["text"] for answer in twice] == [expected[1]] * 2
    named = await generate(
        pair, input_ids=[PROMPT, [5]], rid=["a", "b"], sampling_params={"max_new_tokens": 1}
    )
    assert [answer["meta_info"]["id"] for answer in named] == ["a", "b"]


async def test_streamed_text_is_all_of_the_text_so_far(pair: Served) -> None:
    settings = {"max_new_tokens": 15, "ignore_eos": True}
    events = await generate(pair, input_ids=PROMPT, stream=True, sampling_params=settings)
    whole = await generate(pair, input_ids=PROMPT, sampling_params=settings)
    texts = [event["text"] for event in events]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == whole["text"]
    assert [event["meta_info"]["completion_tokens"] for event in events] == list(range(1, 16))
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons[:-1] == [None] * 14
    assert reasons[-1] == {"type": "length", "length": 15}
    both = await generate(pair, text=["a", "b"], stream=True, sampling_params={"max_new_tokens": 3})
    assert {event["index"] for event in both} == {0, 1}


async def test_log_probabilities_are_triples_of_number_id_and_text(pair: Served) -> None:
    settings = {"max_new_tokens": 4, "temperature": 0}
    plain = await generate(pair, text=TEXT, return_logprob=True, sampling_params=settings)
    direct = await pair.service.router.generate(TEXT, max_tokens=4, logprobs=True)
    meta = plain["meta_info"]
    assert meta["output_token_logprobs"] == [[t.logprob, t.id, None] for t in direct.tokens]
    assert meta["input_token_logprobs"] == []
    more = {"logprob_start_len": 2, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    full = await generate(pair, text=TEXT, return_logprob=True, sampling_params=settings, **more)
    scored = (await pair.service.router.score(TEXT, top=2))[2:]
    assert [entry[:2] for entry in full["meta_info"]["input_token_logprobs"]] == [
        [token.logprob, token.id] for token in scored
    ]
    assert full["meta_info"]["input_token_logprobs"][0][2] == ":"
    assert [len(top) for top in full["meta_info"]["output_top_logprobs"]] == [2] * 4
    whole = await generate(
        pair, text=TEXT, return_logprob=True, logprob_start_len=0, sampling_params=settings
    )
    assert whole["meta_info"]["input_token_logprobs"][0][0] is None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "text", "give either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text", "give either text or input_ids"),
        ({"text": []}, "text", "text must be one prompt or a list of prompts"),
        ({"input_ids": ["a"]}, "input_ids", "input_ids must be one prompt or a list of prompts"),
        ({"input_ids": [1, 1000]}, "input_ids", "token id 1000 at index 1"),
        ({"text": ""}, "text", "the prompt is empty"),
        (
            {"text": "a", "sampling_params": {"temperature": "x"}},
            "sampling_params.temperature",
            "sampling_params.temperature: expected float, got str",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": "x"}},
            "sampling_params.max_new_tokens",
            "sampling_params.max_new_tokens: expected int, got str",
        ),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 5}},
            "sampling_params.min_new_tokens",
            "sampling_params.min_new_tokens 9 exceeds sampling_params.max_new_tokens 5",
        ),
        (
            {"text": "a", "sampling_params": {"stop": ["stop", ""]}},
            "sampling_params.stop",
            "sampling_params.stop must be texts of at least one character each, without lone surrogates, got "
            "('stop', '')",
        ),
        (
            {"text": "a", "sampling_params": {"stop": ["a", 1]}},
            "sampling_params.stop[1]",
            "sampling_params.stop[1]: expected str, got int",
        ),
        ({"text": "a", "sampling_params": {"n": "x"}}, "sampling_params.n", "expected int, got str"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 0}},
            "sampling_params.max_new_tokens",
            "at least 1",
        ),
        (
            {"text": "a", "sampling_params": {"temperature": -1}},
            "sampling_params.temperature",
            "sampling_params.temperature must be",
        ),
        (
            {"text": "a", "sampling_params": {"regex": "a+"}},
            "sampling_params.regex",
            "regex is not supported",
        ),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n", "a request can have 1 to"),
        ({"text": "a", "lora_path": "x"}, "lora_path", "lora_path is not supported"),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(
    pair: Served, body: dict[str, Any], param: str, message: str
) -> None:
    reply = await pair.post("/generate", body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert message in reply.error["message"]


@pytest.mark.parametrize("prefix", ["", "get_"])
async def test_a_bench_finds_the_tokenizer_and_the_state_of_the_models(pair: Served, prefix: str) -> None:
    info = (await pair.get(f"/{prefix}model_info")).json
    entry = pair.service.router.recipe.models[0].config.path
    assert info["model_path"] == info["tokenizer_path"] == entry
    assert info["is_generation"] is True
    state = (await pair.get(f"/{prefix}server_info")).json
    assert [model["name"] for model in state["internal_states"]] == ["slm", "llm"]
    assert state["context_length"] == 1024
