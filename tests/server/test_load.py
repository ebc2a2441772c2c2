"""Too many clients, and clients that are too slow."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from tests.recipes import recipe_of, toy_model, toy_pair
from tests.server.client import Reply
from tests.server.conftest import Served, serving
from tokenflow.actors.admission import QueueLimits

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50, 60]
SLOTS = WAITING = 64
CLIENTS = 500


async def test_of_500_clients_at_once_those_that_cannot_wait_are_told_to_come_back(tmp_path: Path) -> None:
    """64 run and 64 wait; the others know at once, and cost nothing."""
    async with serving(toy_pair(tmp_path, slm={"step_s": 0.01}), max_queued=WAITING) as served:
        memory = await crowd(served)
        for _ in range(3):
            after = await crowd(served)
        assert after < memory + 20 * 2**20
        assert (await served.complete(PROMPT, max_tokens=3))["choices"]
        refused = await served.metric("admission_rejections_total", reason="queue_full")
        assert refused == 4 * (CLIENTS - SLOTS - WAITING)


async def crowd(served: Served) -> int:
    """Ask from many connections at once; returns the memory of this process afterwards."""
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(served.connect()) for _ in range(CLIENTS)]
        for connection in connections:
            connection.ask("POST", "/v1/completions", body)
        replies = await asyncio.gather(*(connection.reply() for connection in connections))
    refused = [reply for reply in replies if reply.status != 200]
    assert len(refused) == CLIENTS - SLOTS - WAITING
    for reply in refused:
        assert (reply.status, reply.error["type"]) == (503, "overloaded_error")
        assert reply.error["code"] == "queue_full"
        assert reply.headers["retry-after"] == "1"
    gc.collect()
    return int(psutil.Process().memory_info().rss)


async def test_without_a_queue_only_what_can_begin_is_taken(tmp_path: Path) -> None:
    recipe = recipe_of((toy_model(tmp_path, "m", 1, step_s=0.01, max_requests=2),), {})
    async with serving(recipe, max_queued=0) as served, AsyncExitStack() as stack:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        for _ in range(2):
            exchange = await stack.enter_async_context(served.open("POST", "/v1/completions", body))
            assert await exchange.head() == 200
        assert (await served.get("/health")).status == 200
        for reply in (await served.get("/ready"), await served.post("/v1/completions", body)):
            assert (reply.status, reply.error["code"]) == (503, "queue_full")
        exchange.drop()
        await served.until(lambda: served.service.router.load.running == 1)
        assert (await served.get("/ready")).status == 200
        assert (await served.complete(PROMPT, max_tokens=3))["choices"]


async def test_a_request_for_more_than_may_wait_is_taken_as_a_whole(tmp_path: Path) -> None:
    """It would never be served otherwise; while it waits, nobody else may."""
    recipe = recipe_of((toy_model(tmp_path, "m", 1, step_s=0.005, max_requests=2),), {})
    async with serving(recipe, max_queued=4) as served, AsyncExitStack() as stack:
        body = {"prompt": [[1, 40 + number] for number in range(12)], "max_tokens": 6, "ignore_eos": True}
        many = await stack.enter_async_context(served.open("POST", "/v1/completions", body))
        await served.until(lambda: served.service.router.load == (2, 10, 2))
        reply = await served.post("/v1/completions", {"prompt": PROMPT})
        assert (reply.status, reply.error["code"]) == (503, "queue_full")
        answer = (await many.reply()).json
        assert [choice["index"] for choice in answer["choices"]] == list(range(12))
        assert answer["usage"]["completion_tokens"] == 72
        assert (await served.complete(PROMPT, max_tokens=3))["choices"]


async def test_prompts_that_are_too_long_to_wait_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of((toy_model(tmp_path, "m", 1, step_s=0.01, max_requests=1),), {})
    monkeypatch.setattr("tokenflow.router.QueueLimits", lambda requests, tokens: QueueLimits(requests, 100))
    async with serving(recipe) as served, AsyncExitStack() as stack:
        long = {"prompt": [1] * 90, "max_tokens": 100, "ignore_eos": True}
        for queued in range(2):
            await stack.enter_async_context(served.open("POST", "/v1/completions", long))
            await served.until(lambda waiting=queued: served.service.router.load.queued == waiting)  # type: ignore[misc]
        for stream in (False, True):
            reply = await served.post("/v1/completions", {**long, "stream": stream})
            assert (reply.status, reply.error["code"]) == (503, "queue_full")
            assert reply.headers["retry-after"] == "1"
            assert "90 prompt tokens wait" in reply.error["message"]
        assert await served.metric("admission_rejections_total", reason="queue_full") == 2


async def test_a_response_that_takes_too_long_ends_with_an_error(tmp_path: Path) -> None:
    recipe = recipe_of((toy_model(tmp_path, "m", 1, step_s=0.01, max_requests=1),), {})
    async with serving(recipe, request_timeout=0.3) as served:
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
        async with served.open("POST", "/v1/completions", {**body, "stream": True}) as stream:
            assert await stream.head() == 200
            streamed = Reply(200, stream.headers, b"".join([chunk async for chunk in stream.chunks()]))
        reply = await served.post("/v1/completions", body)
        assert (reply.status, reply.error["type"]) == (504, "server_error")
        assert reply.error["code"] == "request_timeout"
        assert "longer than its timeout of 0.3 s" in reply.error["message"]
        assert reply.headers["x-should-retry"] == "false"
        *tokens, last = streamed.events
        assert len(tokens) > 3
        assert last["error"]["code"] == "request_timeout"
        assert (await served.complete(PROMPT, max_tokens=3))["choices"]


async def test_a_client_that_reads_a_byte_a_second_slows_nobody(tmp_path: Path) -> None:
    """Many tokens with many log-probabilities fill every buffer on the way to it."""
    async with serving(recipe_of((toy_model(tmp_path, "m", 1),), {})) as served:
        body = {
            "prompt": PROMPT,
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
            "n": 12,
        }
        alone = await timed(served)
        async with served.connect(narrow=True) as exchange:
            exchange.ask("POST", "/v1/completions", body)
            assert await exchange.reader.read(1) == b"H"
            await served.until(lambda: not served.service.router.load.running)
            assert served.service.open == 1, "the answer went out at once: the test does not test"
            assert await timed(served) < 2 * alone + 0.5
            assert await exchange.reader.read(1) == b"T"
            exchange.drop()
        await served.until(lambda: not served.service.open, 1)


async def timed(served: Served) -> float:
    """Seconds that four clients need."""
    started = time.monotonic()
    tasks = [served.complete([1, 50 + number], max_tokens=100, stream=True) for number in range(4)]
    await asyncio.gather(*tasks)
    return time.monotonic() - started
