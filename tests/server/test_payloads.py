"""What clients send, word for word, and how they read what they get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server import readers
from tests.server.conftest import Served

pytestmark = pytest.mark.anyio

PAYLOADS = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("payloads/*.json")}


@pytest.mark.parametrize("client", PAYLOADS)
async def test_what_clients_send_is_answered(pair: Served, client: str) -> None:
    sent = PAYLOADS[client]
    reply = await pair.post(sent["path"], sent["body"], **sent["headers"])
    assert reply.status == 200, reply.body
    if sent["body"].get("stream"):
        assert reply.events
        assert not any("error" in event for event in reply.events)
    else:
        assert reply.json["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("client", "read"),
    [
        ("vllm_bench_completions", readers.vllm_completions),
        ("vllm_bench_chat", readers.vllm_chat),
        ("sglang_bench_completions", readers.sglang_completions),
        ("sglang_bench_native", readers.sglang_native),
    ],
)
async def test_a_load_generator_counts_a_chunk_for_each_token(pair: Served, client: str, read: Any) -> None:
    sent = PAYLOADS[client]
    reply = await pair.post(sent["path"], sent["body"], **sent["headers"])
    reading = read(reply.body)
    prompt: Any = "93*7=?" if "chat" not in client else [{"role": "user", "content": "93*7=?"}]
    direct = await pair.service.router.generate(prompt, max_tokens=20, ignore_eos=True)
    assert reading.finished
    assert reading.text == direct.text
    assert reading.tokens == (None if client == "sglang_bench_completions" else 20)
    texts = [token.text for token in direct.tokens]
    # One of them does not count what shows nothing, the other only what comes before the first text.
    silent = {
        "sglang_bench_completions": sum(not text for text in texts),
        "sglang_bench_native": next(n for n, text in enumerate(texts) if text),
    }
    assert 1 + len(reading.later) == 20 - silent.get(client, 0)
    assert b"\n:" not in reply.body


async def test_a_load_generator_without_a_model_name_finds_one(pair: Served) -> None:
    first = (await pair.get("/v1/models")).json["data"][0]
    assert first["id"] == "toy"
    assert Path(first["root"]).joinpath("tokenizer.json").is_file()


async def test_a_harness_adds_up_the_likelihood_of_a_continuation(pair: Served) -> None:
    """The arithmetic of lm-eval's local-completions: sum from the context on, without the token written."""
    sent = PAYLOADS["lm_eval_loglikelihood"]["body"]
    (prompt,) = sent["prompt"]
    scored = await pair.service.router.score(prompt, top=1)
    for context in range(1, len(prompt)):
        reply = await pair.post("/v1/completions", sent)
        (choice,) = sorted(reply.json["choices"], key=lambda choice: choice["index"])
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(prompt) + 1
        values = logprobs["token_logprobs"][context:-1]
        tops = logprobs["top_logprobs"][context:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        expected = scored[context:]
        assert sum(values) == sum(token.logprob or 0 for token in expected)
        assert greedy == all(token.id == token.top_logprobs[0].id for token in expected)


async def test_a_continuation_that_is_the_models_own_choice_is_known_as_greedy(pair: Served) -> None:
    start = [1, 40, 50]
    own = await pair.service.router.generate(start, member="llm", max_tokens=4)
    body = {**PAYLOADS["lm_eval_loglikelihood"]["body"], "prompt": [start + own.token_ids]}
    (choice,) = (await pair.post("/v1/completions", body)).json["choices"]
    values = choice["logprobs"]["token_logprobs"][len(start) : -1]
    tops = choice["logprobs"]["top_logprobs"][len(start) : -1]
    assert len(values) == 4
    assert all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


async def test_the_token_written_after_a_scored_prompt_has_an_entry_even_if_it_ends(pair: Served) -> None:
    body = {**PAYLOADS["lm_eval_loglikelihood"]["body"], "logit_bias": {"2": 100}}
    (choice,) = (await pair.post("/v1/completions", body)).json["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == "<eos>"
    assert len(choice["logprobs"]["token_logprobs"]) == len(body["prompt"][0]) + 1
    text = pair.service.router.tokenizer.decode(body["prompt"][0])
    assert choice["text"] == text
