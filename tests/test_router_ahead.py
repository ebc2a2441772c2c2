"""Workers that go on by themselves, seen from the router: the same answers, and nobody waits for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.recipes import recipe_of, toy_model, toy_pair
from tests.test_router import PROMPT, Log, expected_pair
from tokenflow.router import Router

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_nursery")]


async def test_a_lone_request_runs_ahead_and_gets_the_same_answer(tmp_path: Path) -> None:
    log = Log()
    async with Router(toy_pair(tmp_path), observer=log) as router:
        answer = await router.generate(PROMPT, max_tokens=200, ignore_eos=True)
        expected = expected_pair(PROMPT, 200)
    alone = [done for _, _, done in log.steps if done.ahead]
    assert len(alone) > 20
    length = min(len(expected[0]), 200)
    assert (answer.token_ids[:length], answer.models[:length]) == expected


async def test_steps_that_nobody_sent_are_observed_as_if_they_had_been(tmp_path: Path) -> None:
    """Each row begins where the last one ended, with the token that was sampled there."""
    log = Log()
    recipe = recipe_of((toy_model(tmp_path, "only", 1),), {})
    async with Router(recipe, observer=log) as router:
        answer = await router.generate(PROMPT, max_tokens=60, ignore_eos=True)
    given: list[int] = []
    for _, step, _ in log.steps:
        for row in step.rows:
            assert row.base == len(given)
            given += row.tokens
    assert given == [*PROMPT, *answer.token_ids[:-1]]
    assert any(done.ahead for _, _, done in log.steps)


async def test_a_request_that_comes_joins_the_batch_of_one_that_runs_ahead(tmp_path: Path) -> None:
    log = Log()
    recipe = recipe_of((toy_model(tmp_path, "only", 1, step_s=0.002),), {})
    async with Router(recipe, observer=log) as router:
        first = asyncio.ensure_future(router.generate([1, 40], max_tokens=400, ignore_eos=True))
        await log.until(lambda: any(done.ahead for _, _, done in log.steps))
        began = len(log.steps)
        await router.generate([1, 41], max_tokens=5)
        together = [index for index, (_, step, _) in enumerate(log.steps) if len(step.rows) == 2]
        assert together and together[0] <= began + 5
        await first


async def test_a_request_that_runs_ahead_is_cancelled_like_any_other(tmp_path: Path) -> None:
    log = Log()
    recipe = recipe_of((toy_model(tmp_path, "only", 1, step_s=0.002),), {})
    async with Router(recipe, observer=log) as router:
        task = asyncio.ensure_future(router.generate(PROMPT, max_tokens=900, ignore_eos=True))
        await log.until(lambda: any(done.ahead for _, _, done in log.steps))
        began = len(log.steps)
        task.cancel()
        await log.until(lambda: not log.open_handles)
        assert len(log.steps) - began < 20


async def test_a_text_that_stops_a_response_stops_one_that_runs_ahead(tmp_path: Path) -> None:
    recipe = recipe_of((toy_model(tmp_path, "only", 1),), {})
    async with Router(recipe) as router:
        whole = await router.generate(PROMPT, max_tokens=60, ignore_eos=True)
        stop = whole.text[20:23]
        cut = await router.generate(PROMPT, max_tokens=60, ignore_eos=True, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


async def test_memory_for_one_request_is_enough_for_two_that_run_ahead(tmp_path: Path) -> None:
    """Whoever runs unseen has its memory booked, so the other one is never promised it."""
    recipe = recipe_of((toy_model(tmp_path, "only", 1, kv_capacity=130),), {})
    async with Router(recipe) as router:
        alone = [await router.generate([1, 40 + i], max_tokens=100, ignore_eos=True) for i in range(2)]
        both = await router.generate_many([[1, 40], [1, 41]], concurrency=2, max_tokens=100, ignore_eos=True)
    assert [answer.token_ids for answer in both] == [answer.token_ids for answer in alone]


async def test_nobody_books_memory_ahead_that_its_response_cannot_use(tmp_path: Path) -> None:
    """Two fit exactly: who comes late joins the one that is about to end."""
    log = Log()
    recipe = recipe_of((toy_model(tmp_path, "only", 1, step_s=0.005, kv_capacity=(2 + 120) + (30 + 5)),), {})
    async with Router(recipe, observer=log) as router:
        first = asyncio.ensure_future(router.generate([1, 40], max_tokens=120, ignore_eos=True))
        await log.until(lambda: len(log.steps) > 85)
        await router.generate([1] * 30, max_tokens=5, ignore_eos=True)
        assert not first.done()
        await first
    assert not any(opened.epoch for _, step, _ in log.steps for opened in step.open)


async def test_where_the_router_decides_who_goes_on_no_worker_does(tmp_path: Path) -> None:
    log = Log()
    recipe = replace(toy_pair(tmp_path), rollback=3)
    async with Router(recipe, observer=log) as router:
        await router.generate(PROMPT, max_tokens=40)
    assert log.steps
    assert not any(step.least for _, step, _ in log.steps)
