"""A recipe of simulated models behind HTTP: it says so wherever somebody may take its text for one."""

from __future__ import annotations

import pytest

from tests.server.conftest import Served, serving
from tokenflow.dsl.load import load_recipe

pytestmark = pytest.mark.anyio

RECIPE = {
    "name": "sim",
    "entry": "slm",
    "models": {
        "slm": {"engine": "sim", "latency_ms": 1, "routing": {"llm": 0.5}, "context_length": 256},
        "llm": {"engine": "sim", "latency_ms": 2, "routing": {"slm": 1}, "context_length": 256},
    },
    "routes": {
        "slm": [{"when": "draw < 0.5", "to": "llm", "send": "drop_last"}],
        "llm": [{"after": 1, "to": "slm", "send": "keep"}],
    },
}


async def test_every_answer_says_that_it_is_simulated() -> None:
    async with serving(load_recipe(RECIPE)) as served:
        for card in (await served.get("/v1/models")).json["data"]:
            assert card["tokenflow"] == {"simulated": True}
            assert card["root"] == "sim"
        answer = await served.complete("hello", max_tokens=20)
        assert answer["tokenflow"]["simulated"] is True
        assert answer["usage"]["completion_tokens"] == 20
        *_, last = await served.complete(
            "hello", max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        assert last["tokenflow"]["simulated"] is True
        assert (await served.chat("hello", max_tokens=5))["tokenflow"]["simulated"] is True
        native = (await served.post("/generate", {"text": "hello"})).json
        assert native["meta_info"]["tokenflow"]["simulated"] is True
        for path in ("/health_generate", "/tokenizer_info", "/model_info", "/server_info", "/metrics"):
            assert (await served.get(path)).status == 200, path
        tokens = (await served.post("/tokenize", {"prompt": "hello"})).json["tokens"]
        assert (await served.post("/detokenize", {"tokens": tokens})).json["prompt"] == "hello"


async def test_what_a_simulated_model_cannot_do_is_refused() -> None:
    async with serving(load_recipe(RECIPE)) as served:
        for body in ({"logprobs": 1}, {"logprobs": 1, "echo": True}, {"temperature": 0.7, "top_p": 0.5}):
            reply = await served.post("/v1/completions", {"prompt": "hello", "max_tokens": 2, **body})
            assert reply.status in (200, 400), reply.body


async def test_a_model_that_is_run_says_nothing_of_that(pair: Served) -> None:
    assert "simulated" not in (await pair.complete("ab", max_tokens=2))["tokenflow"]
    assert "tokenflow" not in (await pair.get("/v1/models")).json["data"][0]
