"""Clients that leave: whatever their request is waiting for, nothing of it stays."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.recipes import recipe_of, toy_model, toy_pair
from tests.server.conftest import Served, serving
from tokenflow.actors.sequence import Phase, Sequence
from tokenflow.dsl.ir import RecipeIR

pytestmark = pytest.mark.anyio

WITHIN_S = 1.0
PROMPT = [1, 40, 50, 60]


def queued(folder: Path) -> tuple[RecipeIR, list[int], Callable[[Served], bool]]:
    """One request runs, the others wait for memory."""
    recipe = toy_pair(folder, slm={"step_s": 0.01, "max_requests": 1}, llm={"step_s": 0.01})
    return recipe, PROMPT, lambda served: served.service.router.load.queued == 3


def prefilling(folder: Path) -> tuple[RecipeIR, list[int], Callable[[Served], bool]]:
    """Long prompts are read in small chunks, and no token was written yet."""
    recipe = recipe_of((toy_model(folder, "m", 1, step_s=0.02),), {})
    object.__setattr__(recipe.models[0].config, "max_batch_tokens", 4)

    def reached(served: Served) -> bool:
        (model,) = served.service.router.status.models
        return model.steps > 3 and not model.committed_tokens

    return recipe, [1, *range(30, 90)] * 8, reached


def decoding(folder: Path) -> tuple[RecipeIR, list[int], Callable[[Served], bool]]:
    """Tokens are being written."""
    recipe = recipe_of((toy_model(folder, "m", 1, step_s=0.005),), {})
    return recipe, PROMPT, lambda served: served.service.router.status.models[0].committed_tokens > 20


def pending(folder: Path) -> tuple[RecipeIR, list[int], Callable[[Served], bool]]:
    """All are away at the large model, which is slow; the small one keeps their cache."""
    always = ("boolean", True)
    models = (toy_model(folder, "slm", 1, salt=1), toy_model(folder, "llm", 2, salt=2, step_s=0.05))
    recipe = recipe_of(models, {"slm": ((always, "llm", "keep"),)})
    return recipe, PROMPT, lambda served: served.service.router.status.models[0].pending == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", [queued, prefilling, decoding, pending])
async def test_a_client_that_leaves_frees_every_model_within_a_second(
    tmp_path: Path, phase: Any, stream: bool
) -> None:
    recipe, prompt, reached = phase(tmp_path)
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    async with serving(recipe) as served, AsyncExitStack() as stack:
        exchanges = [
            await stack.enter_async_context(served.open("POST", "/v1/completions", body)) for _ in range(4)
        ]
        await served.until(lambda: reached(served))
        for exchange in exchanges:
            exchange.drop()
        await served.until(lambda: idle(served) and not served.service.open, WITHIN_S)
        assert await served.metric("num_aborted_requests_total") == 4
        answer = await served.complete(PROMPT, max_tokens=5)
        assert answer["usage"]["completion_tokens"] == 5


async def test_requests_that_end_by_themselves_are_not_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[int] = []
    async with serving(toy_pair(tmp_path)) as served:
        system = served.service.router._system
        assert system is not None
        finish = system.finish

        def watched(sequence: Sequence, reason: Any = None, error: Any = None) -> None:
            if error is not None and sequence.phase is not Phase.FINISHED:
                aborted.append(sequence.id)
            finish(sequence, reason, error)

        monkeypatch.setattr(system, "finish", watched)

        async def ask(number: int) -> None:
            await served.complete([1, 40 + number], max_tokens=5, stream=bool(number % 2), n=1 + number % 3)

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(ask, number)
        await served.until(lambda: idle(served), WITHIN_S)
        assert await served.metric("num_aborted_requests_total") == 0
    assert aborted == []


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a head, of a body, before an answer, and after any number of bytes of one."""
    dice = random.Random(7)
    async with serving(toy_pair(tmp_path, slm={"step_s": 0.001}, llm={"step_s": 0.002})) as served:

        async def ask(number: int) -> None:
            body = {"prompt": [1, 40 + number % 50, 50], "max_tokens": 60, "ignore_eos": True}
            data = json.dumps({**body, "stream": dice.random() < 0.7, "n": dice.choice((1, 1, 3))}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
            async with served.connect() as exchange:
                if dice.random() < 0.3:
                    exchange.writer.write(request[: dice.randrange(1, len(request))])
                else:
                    exchange.writer.write(request)
                    await exchange.reader.read(dice.choice((1, 200, 2000)))
                    for _ in range(dice.randrange(20)):
                        await exchange.reader.read(100)
                exchange.drop()

        for _ in range(5):
            async with anyio.create_task_group() as tasks:
                for number in range(40):
                    tasks.start_soon(ask, number)
        await served.until(lambda: idle(served) and not served.service.open, WITHIN_S)
        assert (await served.complete(PROMPT, max_tokens=5))["usage"]["completion_tokens"] == 5
        assert await served.metric("request_failure_total") == 0
    assert not caplog.records


async def test_a_client_that_leaves_while_its_body_is_read_is_forgotten(pair: Served) -> None:
    headers = {"content-length": "1000"}
    async with pair.open("POST", "/v1/completions", b'{"prompt": ', headers) as exchange:
        # One connection after another is taken: once this is answered, the first was heard.
        assert (await pair.get("/health")).status == 200
        assert pair.service.open == 1
        exchange.drop()
    await pair.until(lambda: not pair.service.open, WITHIN_S)


def idle(served: Served) -> bool:
    """Whether no model has anything of any request: nor does a worker's engine."""
    system = served.service.router._system
    assert system is not None
    status = served.service.router.status
    return (
        status.load[:2] == (0, 0)
        and all(model.kv_used == 0 and model.waiting == 0 for model in status.models)
        and all(not actor._held._given and not actor._held.to_drop for actor in system.actors.values())
    )
