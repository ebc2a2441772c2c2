"""One worker after the other, with small real processes in the worker's place."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskGroup

from tests.actors.test_process import HELLO, PREAMBLE, READY, SERVE, STEP
from tokenflow.actors.child import Child, spawn
from tokenflow.actors.supervisor import Condition, Supervisor, backoff_s
from tokenflow.errors import ModelLoadError, WorkerDied
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import Claim, Grant, Hello, Ready

pytestmark = pytest.mark.anyio

DIES = "os._exit(7)"
SERVE_ROWS = SERVE.replace("[], [], 0.0", "[RowDone(1, 0, 1, 5)], [], 0.0")
ANSWER_ONCE = """
channel.send(ready)
step = channel.receive()
channel.send(StepDone(step.id, [RowDone(1, 0, 1, 5)], [], 0.0, 0.0, 0.0, 0, 0))
os._exit(3)
"""


class Scripts:
    """Starts the next script for each worker, and the last for all that follow."""

    def __init__(self, *bodies: str) -> None:
        self.started = 0
        self._bodies = bodies

    async def __call__(self, channel: int, stderr: int, threads: int) -> Child:
        body = self._bodies[min(self.started, len(self._bodies) - 1)]
        self.started += 1
        if body == "no process":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await spawn(channel, stderr, threads, (sys.executable, "-c", PREAMBLE + body))


class Watched:
    """A supervisor with the conditions that it went through."""

    def __init__(self, scripts: Scripts, restarts: int = 5) -> None:
        self.conditions: list[Condition] = []
        self.refused: list[Ready] = []
        self._news = anyio.Event()
        config = ModelConfig(path="nowhere", restarts=restarts, step_timeout=20.0)
        hello = Hello(**{**{f: getattr(HELLO, f) for f in HELLO.__struct_fields__}, "config": config})
        self.supervisor = Supervisor(hello, STEP, scripts, self._grant, self._check, self._changed)

    async def until(self, condition: Condition, times: int = 1) -> None:
        with anyio.fail_after(20):
            while self.conditions.count(condition) < times:
                self._news = anyio.Event()
                await self._news.wait()

    async def _grant(self, claim: Claim) -> Grant:
        return Grant(None)

    def _check(self, facts: Ready) -> None:
        if facts in self.refused:
            raise ModelLoadError("it does not fit")

    def _changed(self, supervisor: Supervisor) -> None:
        self.conditions.append(supervisor.condition)
        self._news.set()


@contextlib.asynccontextmanager
async def running(watched: Watched) -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as tasks:
        assert await watched.supervisor.start(tasks) == READY
        tasks.start_soon(watched.supervisor.keep_alive, tasks)
        yield tasks
        await watched.supervisor.stop(0)
        tasks.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tokenflow.actors.supervisor._FIRST_BACKOFF_S", 0.01)
    return


async def test_a_killed_worker_is_replaced_by_one_that_answers() -> None:
    watched = Watched(Scripts(SERVE_ROWS))
    async with running(watched):
        first = await watched.supervisor.ready()
        assert len((await first.step(STEP)).rows) == 1
        os.kill(watched.supervisor.pid, signal.SIGKILL)
        await watched.until(Condition.READY, times=2)
        second = await watched.supervisor.ready()
        assert second is not first and second.pid != first.pid
        assert len((await second.step(STEP)).rows) == 1
    assert watched.conditions == [Condition.READY, Condition.RESTARTING, Condition.READY]
    assert watched.supervisor.restarts == 1


async def test_who_hears_of_a_death_first_gets_the_replacement_all_the_same() -> None:
    watched = Watched(Scripts("channel.send(ready); channel.receive(); os._exit(1)", SERVE))
    async with running(watched):
        worker = await watched.supervisor.ready()
        with pytest.raises(WorkerDied):
            await worker.step(STEP)
        assert await watched.supervisor.ready() is not worker


async def test_over_the_budget_the_model_is_given_up_with_the_last_cause() -> None:
    watched = Watched(Scripts(SERVE, DIES), restarts=2)
    async with running(watched):
        os.kill(watched.supervisor.pid, signal.SIGKILL)
        await watched.until(Condition.DOWN)
        for _ in range(2):
            with pytest.raises(WorkerDied) as caught:
                await watched.supervisor.ready()
        kept = watched.supervisor.error
        assert kept is not None and kept.__traceback__ is None, "it keeps the frames of those who asked"
    assert str(caught.value).startswith(
        "model 'slm' is given up: 3 of its workers died in a row without completing a step; the last: "
        f"worker of model 'slm' (pid {watched.supervisor.pid}) ended with exit code 7"
    )
    assert watched.conditions == [Condition.READY, *[Condition.RESTARTING] * 2, Condition.DOWN]


async def test_without_restarts_the_first_death_is_the_last() -> None:
    scripts = Scripts(SERVE)
    watched = Watched(scripts, restarts=0)
    async with running(watched):
        os.kill(watched.supervisor.pid, signal.SIGKILL)
        await watched.until(Condition.DOWN)
    assert scripts.started == 1


async def test_only_a_step_with_rows_renews_the_budget() -> None:
    watched = Watched(Scripts(ANSWER_ONCE), restarts=1)
    async with running(watched):
        for times in (1, 2, 3):
            await watched.until(Condition.READY, times)
            await (await watched.supervisor.ready()).step(STEP)
        await watched.until(Condition.READY, 4)
    assert Condition.DOWN not in watched.conditions
    watched = Watched(Scripts(ANSWER_ONCE.replace("[RowDone(1, 0, 1, 5)]", "[]")), restarts=1)
    async with running(watched):
        for times in (1, 2):
            await watched.until(Condition.READY, times)
            await (await watched.supervisor.ready()).step(STEP)
        await watched.until(Condition.DOWN)


async def test_a_replacement_that_does_not_fit_or_cannot_start_counts_as_a_death(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = SERVE.replace("send(ready)", 'send(Ready(VERSION, 9, 64, 256, 1, 4, "", "cpu", "", 0))')
    assert other != SERVE
    watched = Watched(Scripts(SERVE, other, "no process", SERVE))
    watched.refused = [Ready(READY.version, 9, 64, 256, 1, 4, "", "cpu", "", 0)]
    async with running(watched):
        os.kill(watched.supervisor.pid, signal.SIGKILL)
        await watched.until(Condition.READY, times=2)
    assert "it does not fit; another one is started" in caplog.text
    assert "a worker of model 'slm' cannot be started: [Errno 11]" in caplog.text
    assert watched.conditions.count(Condition.RESTARTING) == 3


async def test_a_replacement_with_less_room_than_the_first_is_replaced_as_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests were admitted by what the first had; the memory of the dead may take a while to come back."""
    capacity = READY.kv_capacity
    less, more = (
        SERVE.replace("send(ready)", f"send(msgspec.structs.replace(ready, kv_capacity={tokens}))")
        for tokens in (capacity - 1, capacity + 1)
    )
    assert less != SERVE
    watched = Watched(Scripts(SERVE, f"import msgspec\n{less}", f"import msgspec\n{more}"))
    async with running(watched):
        os.kill(watched.supervisor.pid, signal.SIGKILL)
        await watched.until(Condition.READY, times=2)
    assert f"has a kv_capacity of {capacity - 1}, and the first had {capacity}; another one" in caplog.text
    assert watched.conditions.count(Condition.RESTARTING) == 2


async def test_a_first_worker_that_cannot_be_started_is_no_bare_error_of_the_system() -> None:
    watched = Watched(Scripts("no process"))
    async with anyio.create_task_group() as tasks:
        with pytest.raises(WorkerDied, match=r"^a worker of model 'slm' cannot be started: \[Errno 11\]"):
            await watched.supervisor.start(tasks)


async def test_a_stop_during_the_back_off_starts_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.actors.supervisor._FIRST_BACKOFF_S", 60.0)
    scripts = Scripts(SERVE, DIES)
    watched = Watched(scripts)
    with anyio.fail_after(10):
        async with running(watched):
            os.kill(watched.supervisor.pid, signal.SIGKILL)
            await watched.until(Condition.RESTARTING, times=2)
    assert scripts.started == 2


async def test_a_stop_while_a_replacement_loads_ends_it(tmp_path: Path) -> None:
    loading = tmp_path / "loading"
    watched = Watched(Scripts(SERVE, f"open({str(loading)!r}, 'w').close(); time.sleep(60)"))
    with anyio.fail_after(20):
        async with running(watched):
            os.kill(watched.supervisor.pid, signal.SIGKILL)
            while not loading.exists():
                await anyio.lowlevel.checkpoint()
    assert watched.conditions == [Condition.READY, Condition.RESTARTING]


def test_the_first_replacement_comes_at_once_and_later_ones_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert [backoff_s(deaths) for deaths in (1, 2, 3, 4, 20)] == [0.0, 0.1, 0.2, 0.4, 10.0]
