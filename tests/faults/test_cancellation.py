"""Requests end when they are told to, wherever they are, once, and nothing of them stays anywhere."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest

from tests.faults.recipes import books, chaos_pair
from tests.recipes import ALWAYS, recipe_of, toy_model
from tests.test_router import Log, expected_pair
from tokenflow.errors import Overloaded, RequestCancelled, RequestTimeout, WorkerDied
from tokenflow.response import Response
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50]
SLOW = [{"slow_s": 0.005}]


async def begin(router: Router, prompt: list[int], tokens: int = 400) -> Response:
    """A response of which the first token is there."""
    response = router.stream(prompt, max_tokens=tokens)
    await anext(response)
    return response


async def test_a_request_that_runs_is_gone_from_the_engine_when_its_end_is_confirmed(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, slm=SLOW, llm=SLOW)
    async with Router(recipe) as router:
        responses = [await begin(router, [1, 40 + i]) for i in range(4)]
        assert any(book["open"] for book in books(recipe))
        await asyncio.gather(*(response.aclose() for response in responses))
        assert books(recipe) == [{"open": 0, "tokens": 0}] * 2
        for response in responses:
            await response.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(response)
        answer = await router.generate(PROMPT, max_tokens=20)
        assert (answer.token_ids, answer.models) == expected_pair(PROMPT, 20)


async def test_a_request_that_waits_for_memory_never_reaches_an_engine(tmp_path: Path) -> None:
    log = Log()
    recipe = chaos_pair(tmp_path, slm=SLOW, llm=SLOW, max_requests=1)
    async with Router(recipe, observer=log) as router:
        first = await begin(router, PROMPT)
        queued = asyncio.ensure_future(router.generate([1, 99], max_tokens=4))
        await log.until(lambda: len(log.steps) > 5)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        await first.aclose()
        answer = await router.generate(PROMPT, max_tokens=4)
        assert len(answer.tokens) == 4
    assert all(row.tokens != [1, 99] for _, step, _ in log.steps for row in step.rows)


async def test_a_request_that_is_pending_leaves_the_model_that_only_keeps_it(tmp_path: Path) -> None:
    log = Log()
    models = (toy_model(tmp_path, "a", 1, salt=1), toy_model(tmp_path, "b", 2, salt=2, step_s=0.005))
    async with Router(recipe_of(models, {"a": ((ALWAYS, "b", "keep"),)}), observer=log) as router:
        response = await begin(router, PROMPT)
        await log.until(lambda: len(log.steps) > 5)
        assert {name for name, _ in log.open_handles} == {"a", "b"}
        await response.aclose()
        await log.until(lambda: not log.open_handles)


async def test_a_cancel_while_the_worker_is_replaced_is_confirmed_too(tmp_path: Path) -> None:
    log = Log()
    recipe = chaos_pair(tmp_path, slm=[{}], llm=[{"kill_at": 3}, {"hang_loading": True}])
    async with Router(recipe, observer=log) as router:
        responses = [router.stream([1, 40 + i], max_tokens=400) for i in range(6)]
        tasks = [asyncio.ensure_future(response.completion()) for response in responses]
        await log.until(lambda: sum(name == "llm" for name, _, _ in log.steps) == 2)
        async with asyncio.timeout(10):
            await asyncio.gather(*(response.aclose() for response in responses))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, RequestCancelled) for result in results)


async def test_random_cancels_leave_nothing_and_end_everybody_once(tmp_path: Path) -> None:
    """Hundreds of requests, a third cancelled as tasks, a third closed, a third left alone; with deaths."""
    dice = random.Random(6)
    recipe = chaos_pair(
        tmp_path, slm=[{"die_at": 40}, {"kill_at": 60}], llm=[{"kill_at": 20}], max_requests=8, kv_cache=200
    )
    outcomes: dict[str, int] = {}

    async def one(router: Router, number: int) -> None:
        prompt = [1, 30 + number % 60]
        response = router.stream(prompt, max_tokens=12)
        task = asyncio.ensure_future(response.completion())
        kind = number % 3
        if kind:
            await asyncio.sleep(dice.uniform(0, 0.05))
            if kind == 1:
                task.cancel()
            else:
                response.close()
        try:
            answer = await task
        except asyncio.CancelledError:
            outcome = "cancelled"
        except RequestCancelled:
            outcome = "closed"
        else:
            outcome = "answered"
            assert (answer.token_ids, answer.models) == expected_pair(prompt, 12)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        await response.aclose()

    async with Router(recipe) as router:
        tasks = len(asyncio.all_tasks())
        todo = iter(range(300))

        async def work() -> None:
            for number in todo:
                await one(router, number)

        await asyncio.gather(*(work() for _ in range(24)))
        assert len(asyncio.all_tasks()) == tasks
        assert [book["open"] for book in books(recipe)] == [0, 0]
        answer = await router.generate(PROMPT, max_tokens=20)
        assert (answer.token_ids, answer.models) == expected_pair(PROMPT, 20)
    assert sum(outcomes.values()) == 300
    assert min(outcomes.get(kind, 0) for kind in ("answered", "cancelled", "closed")) > 10


async def test_a_request_ends_at_its_timeout_wherever_it_is(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, slm=SLOW, llm=SLOW, max_requests=1)
    async with Router(recipe) as router:
        running = asyncio.ensure_future(router.generate(PROMPT, max_tokens=800, timeout=0.3))
        await asyncio.sleep(0)
        with pytest.raises(RequestTimeout, match=r"its timeout of 0.1 s; 0 tokens were written$"):
            await router.generate([1, 41], timeout=0.1)
        with pytest.raises(RequestTimeout, match=r"its timeout of 0.3 s; [1-9]\d* tokens were written$"):
            await running
        answer = await router.generate(PROMPT, max_tokens=20, timeout=60)
        assert (answer.token_ids, answer.models) == expected_pair(PROMPT, 20)


async def test_a_burst_beyond_the_queue_is_refused_at_once(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, slm=SLOW, llm=SLOW, max_requests=2)
    async with Router(recipe, max_queued_requests=4) as router:
        results = await asyncio.gather(
            *(router.generate([1, 40 + i], max_tokens=6) for i in range(40)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, Overloaded)]
        assert len(refused) == 40 - 2 - 4
        for i, result in enumerate(results):
            assert isinstance(result, Overloaded) or result.token_ids == expected_pair([1, 40 + i], 6)[0]
        assert len((await router.generate(PROMPT, max_tokens=4)).tokens) == 4


async def test_prompts_that_are_too_long_together_are_refused(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, slm=SLOW, llm=SLOW, max_requests=1)
    async with Router(recipe, max_queued_tokens=100) as router:
        first = await begin(router, PROMPT)
        waiting = asyncio.ensure_future(router.generate([1] * 90, max_tokens=2))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="max_queued_tokens"):
            await router.generate([1] * 20, max_tokens=2)
        await first.aclose()
        assert len((await waiting).tokens) == 2


async def test_a_slow_reader_gets_few_large_events_and_everything(tmp_path: Path) -> None:
    async with Router(chaos_pair(tmp_path)) as router:
        whole = await router.generate(PROMPT, max_tokens=60)
        response = router.stream(PROMPT, max_tokens=60)
        events = [await anext(response)]
        other = router.generate([1, 77], max_tokens=120)
        await other
        events += [event async for event in response]
    assert "".join(event.text for event in events) == whole.text
    assert len(events) <= 3


async def test_a_response_that_nobody_wants_any_more_is_cancelled(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, slm=SLOW, llm=SLOW)
    log = Log()
    async with Router(recipe, observer=log) as router:
        response = await begin(router, PROMPT)
        del response
        gc.collect()
        await log.until(lambda: not log.open_handles)


async def test_who_waits_at_a_model_that_is_given_up_can_still_be_cancelled(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, llm=[{"kill_at": 1}], restarts=0)
    async with Router(recipe) as router:
        response = router.stream(PROMPT, max_tokens=400)
        with pytest.raises(WorkerDied):
            await response.completion()
        await response.aclose()
