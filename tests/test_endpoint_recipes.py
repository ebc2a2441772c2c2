"""A member of a recipe behind an endpoint, through the whole runtime: real workers, real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

from tests.endpoint import Endpoint, status
from tests.recipes import DEMO
from tests.reference.record import eval_prompts
from tokenflow.engines.base import Extend
from tokenflow.engines.torch import TorchEngine
from tokenflow.errors import EndpointFailed, InvalidRequest
from tokenflow.router import Router
from tokenflow.types import ModelConfig

pytestmark = pytest.mark.anyio

FLOAT = {"dtype": "float32"}
ROUTES = {
    "slm": [{"when": "margin < 0.95", "to": "llm", "send": "drop_last"}],
    "llm": [{"when": "margin >= 0.95", "to": "slm", "send": "keep"}],
}


class Brain:
    """The large demo model, as a function of token ids."""

    def __init__(self) -> None:
        self._engine = TorchEngine(ModelConfig(path=str(DEMO / "large"), dtype="float32", device="cpu"))
        self._lock = Lock()

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        with self._lock:
            slot, cached = self._engine.open(ids)
            logits = self._engine.step([Extend(slot, ids[cached:])]).logits[0]
            self._engine.release(slot)
            return logits


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(logits=Brain(), card={"id": "large", "max_model_len": 1024}) as running:
        yield running


def recipe(llm: dict[str, Any], routes: dict[str, Any] = ROUTES) -> dict[str, Any]:
    """The demo pair with the large model run as ``llm`` says."""
    models = {
        "slm": {"path": str(DEMO / "small"), "dtype": "float32"},
        "llm": {"path": str(DEMO / "large"), **llm},
    }
    return {"name": "pair", "entry": "slm", "models": models, "routes": routes}


def remote(endpoint: Endpoint, **settings: Any) -> dict[str, Any]:
    """The large model behind the endpoint."""
    return {"engine": "openai", "endpoint": {"base_url": endpoint.url, **settings}}


async def test_text_and_trace_are_those_of_the_same_model_run_here(endpoint: Endpoint) -> None:
    prompts = eval_prompts(200)[:12]
    request: dict[str, Any] = {"max_tokens": 60, "concurrency": 4}
    async with Router(recipe(FLOAT)) as router:
        local = await router.generate_many(prompts, **request)
    async with Router(recipe(remote(endpoint, span=2))) as router:
        there = await router.generate_many(prompts, **request)
    assert [(one.token_ids, one.models) for one in there] == [(one.token_ids, one.models) for one in local]
    assert any("llm" in one.models for one in there)


async def test_seeds_and_penalties_mean_the_same_on_both_sides_of_an_endpoint(endpoint: Endpoint) -> None:
    prompt = eval_prompts(200)[0]
    request: dict[str, Any] = {
        "max_tokens": 40,
        "temperature": 0.9,
        "top_k": 10,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logprobs": True,
    }
    alone = {"slm": [{"when": "true", "to": "llm", "send": "drop_last"}]}
    async with Router(recipe(FLOAT, alone)) as router:
        local = await router.generate(prompt, **request)
    async with Router(recipe(remote(endpoint), alone)) as router:
        there = await router.generate(prompt, **request)
        assert there.token_ids == local.token_ids
        for one, other in zip(there.tokens, local.tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        for field, value in (("repetition_penalty", 1.1), ("top_logprobs", 21)):
            with pytest.raises(InvalidRequest) as refused:
                await router.generate(prompt, **{field: value})
            assert refused.value.param == field


async def test_a_request_that_the_endpoint_fails_says_so_and_the_others_go_on(endpoint: Endpoint) -> None:
    prompts = eval_prompts(200)[:3]
    routes = {"slm": [{"when": "true", "to": "llm", "send": "drop_last"}]}
    async with Router(recipe(remote(endpoint, retries=0), routes)) as router:
        endpoint.faults.append(status(400, "this prompt is not for me"))
        with pytest.raises(
            EndpointFailed, match=r"answered 400: this prompt is not for me \(at output position 0"
        ):
            await router.generate(prompts[0], max_tokens=5)
        answers = await router.generate_many(prompts, max_tokens=5)
        assert [answer.usage.by_model["llm"] for answer in answers] == [5, 5, 5]


LARGE = {
    "name": "large",
    "entry": "llm",
    "models": {"llm": {"path": str(DEMO / "large"), **FLOAT}},
}


@asynccontextmanager
async def served(recipe: dict[str, Any], folder: Path) -> AsyncIterator[str]:
    """The base URL of tokenflow serving a recipe, as a process of its own."""
    file = folder / "served.yaml"
    file.write_text(json.dumps(recipe))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenflow.cli", "serve", str(file), "--port", "0"),
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    try:
        while "ready in" not in (line := (await process.stderr.readline()).decode()):
            assert line, "the server ended"
        yield f"{line.split()[-1]}/v1"
    finally:
        process.terminate()
        await process.communicate()


@pytest.mark.skipif(find_spec("tokenflow.server") is None, reason="there is no server")
@pytest.mark.parametrize("there", [(LARGE, ""), (recipe(FLOAT), "pair/llm")], ids=["alone", "member"])
async def test_tokenflow_is_an_endpoint_for_tokenflow(
    there: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    """A recipe of one model, or one member of a recipe of several."""
    served_recipe, model_id = there
    prompts = eval_prompts(200)[:6]
    request: dict[str, Any] = {"max_tokens": 60, "concurrency": 3}
    async with Router(recipe(FLOAT)) as router:
        local = await router.generate_many(prompts, **request)
    async with served(served_recipe, tmp_path) as url:
        remote = {"engine": "openai", "endpoint": {"base_url": url, "model_id": model_id, "span": 4}}
        async with Router(recipe(remote)) as router:
            answers = await router.generate_many(prompts, **request)
    assert [(one.token_ids, one.models) for one in answers] == [(one.token_ids, one.models) for one in local]
    assert any("llm" in one.models for one in answers)
