"""Simulated models die as others do, and what they write stays the same."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.test_router import Log
from tests.test_sim import recipe
from tokenflow.router import Router
from tokenflow.types import Completion

pytestmark = pytest.mark.anyio


async def ask(router: Router) -> list[tuple[list[int], list[str]]]:
    waiting = (router.generate([1, 2], seed=seed, max_tokens=60) for seed in range(6))
    done: list[Completion] = await asyncio.gather(*waiting)
    return [(answer.token_ids, answer.models) for answer in done]


async def test_what_is_simulated_goes_on_from_what_is_committed() -> None:
    async with Router(recipe()) as router:
        undisturbed = await ask(router)
    log = Log()
    async with Router(recipe(), observer=log) as router:
        assert router._system is not None
        workers = [actor.supervisor for actor in router._system.actors.values()]
        running = asyncio.ensure_future(ask(router))
        for victim in workers:
            before = len(log.steps)
            await log.until(lambda before=before: len(log.steps) > before + 5)
            os.kill(victim.pid, signal.SIGKILL)
        assert await running == undisturbed
        assert [victim.restarts for victim in workers] == [1, 1]
