"""Prompts to be scored beside steps: which of them a worker was at when it ended.

Small real processes are in the worker's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio
import msgspec
import pytest

from tests.actors.test_process import HELLO, STEP, scope, worker
from tokenflow.actors.process import WorkerProcess
from tokenflow.errors import EngineError, WorkerDied
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import Score, Scored

pytestmark = pytest.mark.anyio

FIRST, SECOND = (Score(number, [1, 2], 0) for number in (1, 2))
READ_ONE = "channel.send(ready); channel.receive()\n"
READ_BOTH = "channel.send(ready); first, second = channel.receive(), channel.receive()\n"
DONE = "channel.send(StepDone(1, [], [], 0.0, 0.0, 0.0, 0, 0{}))\n"


async def asked(score: Coroutine[Any, Any, Scored | None]) -> asyncio.Task[Scored | None]:
    """The worker has been asked; its answer is waited for later."""
    task = asyncio.create_task(score)
    await asyncio.sleep(0)
    return task


def with_timeout(slm: WorkerProcess, step_timeout: float) -> WorkerProcess:
    config = ModelConfig(path="nowhere", step_timeout=step_timeout)
    slm.hello = msgspec.structs.replace(HELLO, config=config)
    return slm


async def test_of_a_death_in_a_score_only_that_one_is_told() -> None:
    slm = worker(READ_ONE + "os._exit(3)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        first, second = await asked(slm.score(FIRST)), await asked(slm.score(SECOND))
        with pytest.raises(WorkerDied, match="exit code 3"):
            await first
        assert await second is None


async def test_a_score_that_nobody_waits_for_any_more_answers_for_a_death_in_it() -> None:
    slm = worker(READ_ONE + "os._exit(3)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        first = await asked(slm.score(FIRST))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await slm.score(SECOND) is None


async def test_a_step_comes_before_the_next_score_though_nobody_waits_for_the_last_one() -> None:
    slm = worker("""
        channel.send(ready)
        asked = [channel.receive(), channel.receive()]
        if [type(message) for message in asked] != [Score, Step]:
            os._exit(4)
        channel.send(Scored(1, [], []))
        channel.send(StepDone(1, [], [], 0.0, 0.0, 0.0, 0, 0))
        channel.send(Scored(channel.receive().id, [], []))
        channel.receive()
    """)
    async with scope(slm) as tasks:
        await slm.start(tasks)
        first = await asked(slm.score(FIRST))
        first.cancel()
        second = await asked(slm.score(SECOND))
        await slm.step(STEP)
        assert await second == Scored(2, [], [])


async def test_a_score_does_not_answer_for_a_step_that_the_worker_had_begun_by_itself() -> None:
    slm = worker(READ_BOTH + DONE.format(", ahead=[1]") + "os._exit(3)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        step, score = slm.step(STEP), await asked(slm.score(FIRST))
        assert (await step).ahead == [1]
        with pytest.raises(WorkerDied):
            await slm.ahead()
        assert await score is None


async def test_a_score_answers_for_a_death_once_the_steps_before_it_are_done() -> None:
    slm = worker(READ_BOTH + DONE.format(", ahead=[1]") + DONE.format("") + "os._exit(3)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        step, score = slm.step(STEP), await asked(slm.score(FIRST))
        await step
        await slm.ahead()
        with pytest.raises(WorkerDied, match="exit code 3"):
            await score


async def test_a_score_does_not_answer_for_the_answer_to_a_step_that_makes_no_sense() -> None:
    slm = worker(READ_BOTH + DONE.format("") + "time.sleep(60)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        step, score = slm.step(STEP), await asked(slm.score(FIRST))
        await step
        await slm.fail(EngineError("what is that"))
        assert await score is None


async def test_a_score_does_not_answer_for_a_worker_that_has_hung_up_already() -> None:
    slm = worker("channel.send(ready); sock.close(); time.sleep(60)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        with anyio.fail_after(5):
            await slm._over.wait()
            assert await slm.score(FIRST) is None


@pytest.mark.parametrize("first_leaves", [False, True])
async def test_a_worker_that_hangs_in_a_score_is_dead_though_steps_end_and_who_asked_has_left(
    first_leaves: bool,
) -> None:
    slm = with_timeout(worker(READ_BOTH + DONE.format("") + "time.sleep(60)"), 0.5)
    async with scope(slm) as tasks:
        await slm.start(tasks)
        step, score = slm.step(STEP), await asked(slm.score(FIRST))
        if first_leaves:
            score.cancel()
        await step
        with anyio.fail_after(10):
            await slm.died.wait()
        assert "after no answer within 0.5 s" in str(slm.error)
        assert isinstance((await asyncio.gather(score, return_exceptions=True))[0], BaseException)


async def test_an_answer_to_a_score_that_was_not_asked_for_ends_the_worker() -> None:
    slm = worker("channel.send(ready); channel.receive(); channel.send(Scored(7, [], []))")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        with pytest.raises(WorkerDied, match="unexpected Scored"):
            await slm.step(STEP)
