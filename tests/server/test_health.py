"""Whether a server serves: while it loads, when a model is gone, when it drains; and its metrics."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.recipes import recipe_of, toy_model, toy_pair
from tests.server.conftest import Served, mortal, serving
from tokenflow.server.service import State

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
PROMPT = [1, 40, 50, 60]
ALWAYS = ("boolean", True)


async def test_a_server_that_serves_says_nothing(pair: Served) -> None:
    for path in ("/health", "/ping", "/ready", "/health_generate"):
        reply = await pair.get(path)
        assert (reply.status, reply.body) == (200, b"")
    from importlib.metadata import version

    assert (await pair.get("/version")).json == {"version": version("tokenflow")}


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
async def test_a_server_that_loads_or_drains_says_so_and_takes_nothing(pair: Served, state: State) -> None:
    pair.service.state = state
    try:
        for reply in (
            await pair.get("/health"),
            await pair.get("/ready"),
            await pair.post("/v1/completions", {"prompt": "a"}),
            await pair.post("/v1/chat/completions", {"messages": []}),
            await pair.post("/generate", {"text": "a"}),
            await pair.post("/tokenize", {"prompt": "a"}),
        ):
            assert (reply.status, reply.error["type"]) == (503, "unavailable_error")
            assert reply.error["code"] == "not_ready"
            assert reply.headers["retry-after"] == "1"
            assert reply.error["message"] == state.value
        for path in ("/v1/models", "/metrics", "/version"):
            assert (await pair.get(path)).status == 200
    finally:
        pair.service.state = State.SERVING


async def test_a_dead_model_fails_who_waits_and_is_named_to_who_asks(tmp_path: Path) -> None:
    recipe = mortal(toy_pair(tmp_path, slm={"step_s": 0.002}, llm={"raise_at_step": 4}))
    async with serving(recipe) as served:
        body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
        whole = asyncio.ensure_future(served.post("/v1/completions", body))
        stream = asyncio.ensure_future(served.post("/v1/completions", {**body, "stream": True}))
        reply, streamed = await whole, await stream
        assert reply.status == 503
        assert reply.error["code"] == "worker_died"
        assert "model 'llm': the toy engine raises" in reply.error["message"]
        assert reply.headers["retry-after"] == "1"
        assert streamed.status == 200
        assert streamed.events[-1]["error"] == reply.error
        assert all(event["choices"] for event in streamed.events[:-1])
        for answer in (await served.get("/health"), await served.post("/v1/completions", body)):
            assert answer.status == 503
            assert (answer.error["type"], answer.error["code"]) == ("unavailable_error", "model_down")
            assert "model 'llm'" in answer.error["message"]
        assert await served.metric("request_failure_total", code="worker_died") == 2


async def test_a_server_that_goes_on_without_a_model_is_well_and_says_which_is_down(tmp_path: Path) -> None:
    recipe = mortal(toy_pair(tmp_path, llm={"raise_at_step": 4}))
    async with serving(replace(recipe, on_failure="degrade")) as served:
        body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
        for _ in range(2):
            reply = await served.post("/v1/completions", body)
            assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 60)
            assert (await served.get("/health")).status == 200
        states = (await served.get("/server_info")).json["internal_states"]
        assert {state["name"]: state["condition"] for state in states} == {"slm": "ready", "llm": "down"}
        alone = await served.post("/v1/completions", {**body, "model": "toy/llm"})
        assert (alone.status, alone.error["code"]) == (503, "worker_died")
        assert "without llm" in alone.error["message"]


async def test_a_recipe_that_fails_fails_its_request_and_is_not_tried_again(tmp_path: Path) -> None:
    models = (toy_model(tmp_path, "a", 1, salt=1), toy_model(tmp_path, "b", 2, salt=2))
    recipe = recipe_of(models, {"a": ((ALWAYS, "b", "drop_last"),), "b": ((ALWAYS, "a", "drop_last"),)})
    async with serving(recipe) as served:
        for stream in (False, True):
            reply = await served.post("/v1/completions", {"prompt": PROMPT, "stream": stream})
            assert (reply.status, reply.error["type"]) == (500, "server_error")
            assert reply.error["code"] == "recipe_error"
            assert reply.headers["x-should-retry"] == "false"
            assert "model 'b' hands output position 0 to 'a'" in reply.error["message"]
        assert (await served.get("/health")).status == 200


async def test_metrics_count_what_was_done(tmp_path: Path) -> None:
    async with serving(toy_pair(tmp_path)) as served:
        direct = await served.service.router.generate(PROMPT, max_tokens=40)
        before = await served.metric("steps_total", actor="slm")
        answer = await served.complete(PROMPT, max_tokens=40, stream=True)
        await served.complete(PROMPT, max_tokens=1)
        await served.post("/v1/completions", {})
        usage = direct.usage
        for actor, count in usage.by_model.items():
            written = await served.metric("routed_tokens_total", actor=actor)
            assert written == count + (actor == "slm"), "the last request has one token of the small model"
        assert await served.metric("prompt_tokens_total") == 8
        assert await served.metric("generation_tokens_total") == usage.completion_tokens + 1
        assert await served.metric("dropped_tokens_total") == usage.dropped
        assert await served.metric("handoffs_total") == usage.handoffs
        assert await served.metric("handoff_seconds_count") == 2 * usage.handoffs
        assert await served.metric("steps_total", actor="slm") > before
        assert await served.metric("step_seconds_count", actor="llm") > 0
        assert await served.metric("batch_size_sum", actor="llm") == await served.metric(
            "step_seconds_count", actor="llm"
        ), "one request at a time"
        assert await served.metric("route_decisions_total", route="slm[0]", choice="llm") == 2 * usage.dropped
        assert await served.metric("time_to_first_token_seconds_count") == 2
        assert await served.metric("inter_token_latency_seconds_count") == len(answer) - 1
        assert await served.metric("e2e_request_latency_seconds_count") == 2
        assert await served.metric("request_failure_total", code="invalid_value") == 1
        for idle in ("num_requests_running", "num_requests_waiting", "mailbox_depth", "kv_cache_usage_perc"):
            assert await served.metric(idle) == 0
        assert await served.metric("batch_threshold", actor="llm") == 1


async def test_metrics_are_in_prometheus_s_format_with_and_without_a_slash(pair: Served) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    for path in ("/metrics", "/metrics/"):
        reply = await pair.get(path)
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = list(text_string_to_metric_families(reply.body.decode()))
        names = {family.name for family in families}
        assert {"tokenflow:time_to_first_token_seconds", "tokenflow:routed_tokens"} <= names
        for family in families:
            assert family.documentation
            assert all(sample.labels["model_name"] == "toy" for sample in family.samples)
    described = set(re.findall(r"tokenflow:(\w+)", DOCS.read_text()))
    assert {family.name.removeprefix("tokenflow:") for family in families} == described
