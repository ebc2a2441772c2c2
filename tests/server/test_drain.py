"""The end of a server for those who are in the middle of something."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from tests.recipes import recipe_of, toy_model
from tests.server.conftest import Served, serving
from tokenflow.server import serve
from tokenflow.server.service import State

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50, 60]
BODY = json.dumps({"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}).encode()
LENGTH = {"content-length": str(len(BODY))}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_what_was_begun_before_the_drain_may_be_sent_to_its_end(pair: Served, path: str) -> None:
    body = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 5},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
        "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}},
    }[path]
    data = json.dumps(body).encode()
    async with pair.open("POST", path, data[:10], {"content-length": str(len(data))}) as exchange:
        await heard(pair)
        pair.service.state = State.DRAINING
        try:
            exchange.writer.write(data[10:])
            assert (await exchange.reply()).status == 200
        finally:
            pair.service.state = State.SERVING


async def test_who_has_not_sent_it_by_the_end_of_the_drain_is_told(pair: Served) -> None:
    async with pair.open("POST", "/v1/completions", BODY[:10], LENGTH) as exchange:
        await heard(pair)
        pair.service.state = State.DRAINING
        try:
            pair.service.stop_reading()
            reply = await exchange.reply()
        finally:
            pair.service.state = State.SERVING
    assert (reply.status, reply.error["code"]) == (503, "not_ready")
    assert reply.error["message"] == State.DRAINING.value
    assert reply.headers["retry-after"] == "1"
    assert not pair.service.open


async def test_who_does_not_read_its_last_event_is_left_and_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "_FAREWELL_S", 0.1)
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 12}
    recipe = recipe_of((toy_model(tmp_path, "m", 1),), {})
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(20), serving(recipe) as served, served.connect(narrow=True) as exchange:
            exchange.ask("POST", "/v1/completions", body)
            assert await exchange.reader.read(1) == b"H"
            await served.until(lambda: not served.service.router.load.running)
            assert served.service.open == 1, "the answer went out at once: the test does not test"
            served.stop()
            await served.stopped.wait()
            assert served.service.open == 0
    assert not caplog.records


async def heard(served: Served) -> None:
    """Wait until the server has heard what was sent: one connection after another is taken."""
    assert (await served.get("/health")).status == 200
    assert served.service.open == 1
