"""The scheduler asks its policy about all models at once."""

from __future__ import annotations

import math
import time

import pytest

from tests.planner.models import r2r
from tokenflow.actors.scheduler import Scheduler
from tokenflow.planner import Lookahead, Thresholds


class Clock:
    """A clock that moves only when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_thresholds_look_at_one_queue() -> None:
    waiting = [0, 0]
    scheduler = Scheduler(2, lambda: waiting)
    assert not scheduler.looks_ahead
    scheduler.policy = Thresholds((1, 3))
    waiting[:] = [1, 2]
    assert [scheduler.hold_s(i) for i in (0, 1)] == [0, math.inf]
    waiting[1] = 3
    assert scheduler.hold_s(1) == 0


def test_the_small_model_is_held_for_what_the_large_one_is_about_to_return() -> None:
    """Ten requests come back in 1 ms; one that waits had better wait for them."""
    waiting, clock = [1, 0], Clock()
    scheduler = Scheduler(2, lambda: waiting, clock)
    scheduler.policy = Lookahead.of(r2r(), 11)
    scheduler.began(1, 10)
    assert scheduler.busy and scheduler.looks_ahead
    clock.now = 0.0200
    assert scheduler.hold_s(0) == 0
    clock.now = 0.0269
    assert scheduler.hold_s(0) == pytest.approx(0.001, abs=1e-6)
    scheduler.ended(1)
    assert not scheduler.busy
    waiting[0] = 11
    assert scheduler.hold_s(0) == 0


def test_a_late_batch_is_soon_not_waited_for() -> None:
    clock = Clock()
    scheduler = Scheduler(2, lambda: [1, 0], clock)
    scheduler.policy = Lookahead.of(r2r(), 11)
    scheduler.began(1, 10)
    clock.now = 0.0279 + 0.1
    assert scheduler.hold_s(0) == 0


def test_its_clock_is_finer_than_that_of_an_event_loop() -> None:
    """Batches end within a fraction of a millisecond, in which uvloop's time stands still."""
    scheduler = Scheduler(2, lambda: [1, 0])
    scheduler.policy = Lookahead.of(r2r(small_ms=30.0, large_ms=20.0), 11)
    scheduler.began(1, 10)
    first, began = scheduler.hold_s(0), time.monotonic()
    while time.monotonic() - began < 2e-4:
        pass
    assert first - scheduler.hold_s(0) >= 2e-4
    assert first == pytest.approx(0.02, abs=0.005)


def test_what_starts_whatever_the_others_do_is_known_beforehand() -> None:
    clock = Clock()
    scheduler = Scheduler(2, lambda: [0, 0], clock)
    scheduler.policy = Thresholds((1, 3))
    assert scheduler.free_steps(0, 4) == math.inf
    scheduler.policy = Lookahead.of(r2r(), 11)
    assert scheduler.free_steps(0, 4) == math.inf
    scheduler.began(1, 10)
    assert scheduler.free_steps(0, 4) == 3
    clock.now = 0.0101
    assert scheduler.free_steps(0, 4) == 1
    clock.now = 0.0300
    assert scheduler.free_steps(0, 4) == 0
