"""A prompt to be scored is scored, unless workers die of that alone."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.recipes import chaos_pair
from tests.faults.test_supervision import EXPECTED, PROMPTS
from tokenflow.errors import DeadlyRequest, RouterClosed
from tokenflow.router import Router

pytestmark = pytest.mark.anyio


async def score(router: Router) -> list[float | None]:
    return [token.logprob for token in await router.score(PROMPTS[0], member="slm")]


@pytest.fixture
async def calm(tmp_path_factory: pytest.TempPathFactory, shared_nursery: object) -> list[float | None]:
    """The scores of an undisturbed run."""
    async with Router(chaos_pair(tmp_path_factory.mktemp("calm"))) as router:
        return await score(router)


async def test_a_prompt_is_scored_by_the_next_worker_and_by_no_third(
    tmp_path: Path, calm: list[float | None]
) -> None:
    recipe = chaos_pair(tmp_path, slm=[*[{"die_scoring": True}] * 2, {}, {"die_scoring": True}])
    async with Router(recipe) as router:
        assert router._system is not None
        supervisor = router._system.actors[1].supervisor
        with pytest.raises(
            DeadlyRequest, match=r"^two workers of model 'slm' died while they scored this prompt"
        ):
            await score(router)
        assert await score(router) == calm
        third = await supervisor.ready()
        os.kill(third.pid, signal.SIGKILL)
        await third.died.wait()
        assert await score(router) == calm
        assert supervisor.restarts == 4


async def test_prompts_of_which_workers_die_when_they_are_scored_do_not_take_the_model_down(
    tmp_path: Path,
) -> None:
    recipe = chaos_pair(tmp_path, slm=[{"die_scoring": True}] * 6, restarts=2)
    async with Router(recipe) as router:
        for _ in range(3):
            with pytest.raises(DeadlyRequest):
                await router.score(PROMPTS[0], member="slm")
        assert len(await router.score(PROMPTS[0], member="slm")) == len(PROMPTS[0])


async def test_a_worker_that_hangs_while_it_scores_is_replaced(
    tmp_path: Path, calm: list[float | None]
) -> None:
    hangs = {"hang_scoring": True}
    async with Router(chaos_pair(tmp_path, slm=[hangs, {}, hangs, hangs], step_timeout=0.5)) as router:
        assert router._system is not None
        supervisor = router._system.actors[1].supervisor
        async with asyncio.timeout(20):
            assert await score(router) == calm
            second = await supervisor.ready()
            os.kill(second.pid, signal.SIGSTOP)
            with pytest.raises(DeadlyRequest, match=r"after no answer within 0\.5 s"):
                await score(router)
            assert await score(router) == calm


@pytest.mark.parametrize("life", [{"die_at": 1}, {"oom_at": 1}], ids=str)
async def test_a_prompt_that_waits_for_a_step_does_not_answer_for_that(
    life: dict[str, Any], tmp_path: Path, calm: list[float | None]
) -> None:
    async with Router(chaos_pair(tmp_path, slm=[{"slow_s": 0.2, **life}] * 3)) as router:
        running = asyncio.ensure_future(router.generate(PROMPTS[0], max_tokens=24))
        scores = []
        while not running.done():
            scores.append(await score(router))
        answer = await running
        assert (answer.token_ids, answer.models) == EXPECTED[0]
        assert all(one == calm for one in scores)


async def test_who_waits_for_scores_when_the_router_stops_is_told(tmp_path: Path) -> None:
    async with Router(chaos_pair(tmp_path, slm=[{"slow_s": 0.3}])) as router:
        response = router.stream(PROMPTS[0], max_tokens=400)
        await anext(response)
        waiting = [asyncio.ensure_future(score(router)) for _ in range(3)]
    async with asyncio.timeout(5):
        told = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(told[-1], RouterClosed)
    assert {type(one) for one in told} <= {list, RouterClosed}
