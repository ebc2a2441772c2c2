"""When plans are made, with what, and for how many requests; by a planner that notes what it is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.actors.test_meter import filled
from tests.planner.models import r2r
from tokenflow.actors import planning
from tokenflow.actors.meter import Meter
from tokenflow.actors.planning import Planning
from tokenflow.errors import PlanError
from tokenflow.planner import PolicyTable, Thresholds
from tokenflow.planner.job import Job, read_job

pytestmark = pytest.mark.anyio

# Plans (1, N) for N requests, and writes down what it was asked.
PLANNER = """
import json, pathlib, sys
line = sys.stdin.readline()
with pathlib.Path(sys.argv[1]).open("a") as jobs:
    jobs.write(line)
for n in json.loads(line)["concurrency"]:
    plan = {"concurrency": n, "thresholds": [1, n], "lookahead": False, "tokens_per_s": 1.0}
    print(json.dumps(plan), flush=True)
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Job]]:
    """What the planner was asked so far."""
    asked = tmp_path / "jobs"
    asked.touch()
    monkeypatch.setattr(planning, "_COMMAND", (sys.executable, "-c", PLANNER, str(asked)))
    monkeypatch.setattr(planning, "_TICK_S", 0.01)
    monkeypatch.setattr(planning, "_SHORT_S", 0.0)
    monkeypatch.setattr(planning, "_PAUSE_S", 0.05)
    return lambda: [read_job(line) for line in asked.read_text().splitlines()]


class Load:
    """A load that tests change, and the tables that follow it."""

    def __init__(
        self,
        policy: Any,
        meter: Meter,
        active: int,
        assumed: Any = None,
        slots: int = 64,
        spare: bool = True,
    ) -> None:
        self.active = active
        self.tables: list[PolicyTable] = []
        self.planning = Planning(
            policy, meter, lambda: assumed, lambda: self.active, slots, self.tables.append, spare
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.planning.run)
            while not holds():  # noqa: ASYNC110 (files and tables tell nobody)
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()


async def test_the_present_concurrency_is_planned_first_and_smaller_ones_after_it(jobs: Any) -> None:
    load = Load("auto", filled(), 10)
    await load.until(lambda: len(load.tables) == 6)
    [job] = jobs()
    assert job.concurrency == (10, 8, 6, 4, 3, 2)
    assert job.kind == "best"
    assert job.model.routing[0][1] == pytest.approx(0.35, abs=0.04)
    assert load.tables[0].at(10) == Thresholds((1, 10))
    assert load.tables[5].at(3) == Thresholds((1, 3))


async def test_what_is_assumed_is_planned_at_once(jobs: Any) -> None:
    load = Load("planned", Meter(["slm", "llm"], 0), 0, assumed=r2r(), slots=8)
    await load.until(lambda: len(load.tables) == 5)
    [job] = jobs()
    assert (job.concurrency, job.kind) == ((2, 3, 4, 6, 8), "static")
    assert job.model == r2r()


async def test_a_load_that_stays_is_planned_once(jobs: Any) -> None:
    load = Load("lookahead", filled(), 3)
    with anyio.move_on_after(1.0):
        await load.until(lambda: False)
    assert [job.kind for job in jobs()] == ["lookahead"]


async def test_a_change_of_routing_is_planned_for(jobs: Any) -> None:
    meter = filled()
    load = Load("auto", meter, 4)

    def change() -> bool:
        if len(load.tables) == 3:
            for _ in range(3000):
                meter.moved(0, 1, 0)
                meter.moved(1, 0, 1)
        return len(jobs()) == 2

    await load.until(change)
    assert jobs()[1].model.routing[0][1] > 0.9


async def test_what_was_planned_while_steps_varied_is_planned_again_once_they_do_not(jobs: Any) -> None:
    meter = filled()
    for index in range(100):
        meter.stepped(0, 3, 0.0045 if index % 2 else 0.0075)
    load = Load("auto", meter, 4)

    def settle() -> bool:
        if len(load.tables) == 3:
            for _ in range(1000):
                meter.stepped(0, 3, 0.006)
        return len(jobs()) == 2

    await load.until(settle)
    before, after = (job.model for job in jobs())
    assert after.quantum_ms < before.quantum_ms / 2
    assert after.step_ms(0, 3) == pytest.approx(before.step_ms(0, 3), rel=0.05)


async def test_more_requests_than_were_planned_for_are_planned_for(jobs: Any) -> None:
    load = Load("auto", filled(), 4)

    def grow() -> bool:
        if len(load.tables) == 3:
            load.active = 20
        return len(jobs()) == 2

    await load.until(grow)
    assert jobs()[1].concurrency == (20, 16, 12, 8, 6, 4, 3, 2)


async def test_fewer_requests_need_no_new_plan(jobs: Any) -> None:
    load = Load("auto", filled(), 8)

    def shrink() -> bool:
        load.active = 3 if len(load.tables) == 5 else load.active
        return False

    with anyio.move_on_after(1.0):
        await load.until(shrink)
    assert len(jobs()) == 1


async def test_large_concurrencies_are_planned_up_to_a_bound(jobs: Any) -> None:
    load = Load("auto", filled(), 500, slots=1000)
    await load.until(lambda: bool(load.tables))
    assert jobs()[0].concurrency[0] == 64


@pytest.mark.parametrize("active", [0, 1])
async def test_a_single_request_needs_no_plan(jobs: Any, active: int) -> None:
    load = Load("auto", filled(), active)
    with anyio.move_on_after(0.5):
        await load.until(lambda: False)
    assert jobs() == []


async def test_a_load_that_is_soon_over_needs_no_plan(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, asked = 0, list[int]()

    class Breathing(Load):
        """Is looked at every 0.1 s, there at two looks of three, and then to stay."""

        @property
        def active(self) -> int:
            nonlocal looks
            looks += 1
            return 0 if looks <= 30 and looks % 3 == 0 else 8

        @active.setter
        def active(self, value: int) -> None:
            pass

    async def note() -> None:
        asked.append(looks)

    monkeypatch.setattr(planning, "_SHORT_S", 0.3)
    monkeypatch.setattr(planning.anyio, "current_time", lambda: looks / 10)
    monkeypatch.setattr(planning, "_load", note)
    load = Breathing("auto", filled(), 8)
    await load.until(lambda: bool(load.tables))
    assert asked[0] > 30


async def test_where_models_need_all_cores_only_a_load_that_lasts_is_planned_for_and_rarely(
    jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_SHORT_BUSY_S", 0.3)
    monkeypatch.setattr(planning, "_BUSY_PAUSE", 1000)
    meter = filled()
    load = Load("auto", meter, 4, spare=False)
    began, asked = anyio.current_time(), list[float]()

    def change() -> bool:
        if jobs():
            asked.append(anyio.current_time())
        if len(load.tables) == 3:
            for _ in range(3000):
                meter.moved(0, 1, 0)
                meter.moved(1, 0, 1)
        return False

    with anyio.move_on_after(2.0):
        await load.until(change)
    assert asked[0] - began >= 0.3
    assert len(load.tables) == 3
    assert len(jobs()) == 1


async def test_a_planner_that_fails_leaves_batches_as_they_are(
    jobs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planning, "_COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    load = Load("auto", filled(), 4)
    await load.until(lambda: "planning failed" in caplog.text)
    assert load.tables == []


async def test_what_is_assumed_but_cannot_be_planned_with_leaves_batches_as_they_are(
    jobs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def assumed() -> Any:
        raise PlanError("no such model")

    load = Load("auto", filled(), 4)
    load.planning = Planning("auto", filled(), assumed, lambda: 4, 8, load.tables.append)
    await load.until(lambda: bool(load.tables))
    assert "cannot be planned with (no such model): batches start as before" in caplog.text
    assert len(jobs()) == 1


async def test_planning_ends_with_the_router(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    load = Load("auto", filled(), 4)
    with anyio.fail_after(10), anyio.move_on_after(1.0):
        await load.until(lambda: False)


async def test_a_plan_is_not_given_up_for_another_before_it_has_found_anything(jobs: Any) -> None:
    """A load that changes all the time would never be planned for."""
    meter = filled()
    load = Load("auto", meter, 8)
    turn = 0

    def shake() -> bool:
        nonlocal turn
        turn += 1
        for _ in range(1000):
            meter.moved(0, turn % 2, 1)
        return len(jobs()) == 3

    await load.until(shake)
    assert len(load.tables) >= 2
