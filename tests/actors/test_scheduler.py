"""The scheduler asks its policy about all models at once."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.actors.test_mailbox import ManualLoop
from tests.planner.models import r2r
from tokenflow.actors.scheduler import Scheduler
from tokenflow.planner import Lookahead, Thresholds


@pytest.fixture
def loop() -> ManualLoop:
    return ManualLoop()


def test_thresholds_look_at_one_queue() -> None:
    waiting = [0, 0]
    scheduler = Scheduler(2, lambda: waiting)
    assert not scheduler.looks_ahead
    scheduler.policy = Thresholds((1, 3))
    waiting[:] = [1, 2]
    assert [scheduler.hold_s(i) for i in (0, 1)] == [0, math.inf]
    waiting[1] = 3
    assert scheduler.hold_s(1) == 0


def test_the_small_model_is_held_for_what_the_large_one_is_about_to_return(loop: ManualLoop) -> None:
    """Ten requests come back in 1 ms; one that waits had better wait for them."""
    waiting = [1, 0]
    scheduler = Scheduler(2, lambda: waiting)
    scheduler.policy = Lookahead.of(r2r(), 11)
    held: list[float] = []

    def ask() -> None:
        held.append(scheduler.hold_s(0))

    loop.call(lambda: scheduler.began(1, 10))
    assert scheduler.busy and scheduler.looks_ahead
    loop.now = 0.0200
    loop.call(ask)
    loop.now = 0.0269
    loop.call(ask)
    loop.call(lambda: scheduler.ended(1))
    assert not scheduler.busy
    waiting[0] = 11
    loop.call(ask)
    assert held == [0, pytest.approx(0.001, abs=1e-6), 0]
    loop.close()


def test_a_late_batch_is_soon_not_waited_for(loop: ManualLoop) -> None:
    scheduler = Scheduler(2, lambda: [1, 0])
    scheduler.policy = Lookahead.of(r2r(), 11)
    loop.call(lambda: scheduler.began(1, 10))
    loop.now = 0.0279 + 0.1
    held: list[float] = []
    loop.call(lambda: held.append(scheduler.hold_s(0)))
    assert held == [0]
    loop.close()


def test_it_asks_the_running_loop_for_the_time() -> None:
    scheduler = Scheduler(1, lambda: [1])

    async def begin() -> None:
        scheduler.began(0, 1)

    asyncio.run(begin())
    assert scheduler.busy
