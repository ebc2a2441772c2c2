"""The nursery is no more to be relied on than the workers that it forks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.faults.recipes import chaos_pair
from tests.faults.test_supervision import EXPECTED, answers
from tests.test_router import Log
from tokenflow.actors import nursery as nursery_module
from tokenflow.actors.child import Child, spawn
from tokenflow.errors import WorkerDied
from tokenflow.router import Router

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def one_nursery() -> None:
    """Each of these routers has its own, to lose."""


async def test_a_nursery_that_is_killed_takes_no_request_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log()
    async with Router(chaos_pair(tmp_path, slm=[{"slow_s": 0.01}]), observer=log) as router:
        running = asyncio.ensure_future(answers(router))
        await log.until(lambda: len(log.steps) > 5)
        before = find_nursery()
        os.kill(before.pid, signal.SIGKILL)
        assert await running == EXPECTED
        assert find_nursery().pid != before.pid
    told = [record.message for record in caplog.records if record.name == "tokenflow.nursery"]
    assert told == [f"the nursery (pid {before.pid}), and all workers with it, ended with signal 9 (SIGKILL)"]


async def test_a_nursery_that_is_stopped_goes_on_once_a_worker_has_died(tmp_path: Path) -> None:
    log = Log()
    async with Router(chaos_pair(tmp_path, slm=[{"slow_s": 0.01}]), observer=log) as router:
        running = asyncio.ensure_future(answers(router))
        await log.until(lambda: len(log.steps) > 5)
        before = find_nursery()
        worker = before.children()[0]
        before.suspend()
        worker.kill()
        assert await running == EXPECTED
        assert find_nursery().pid == before.pid


async def test_a_nursery_that_is_stopped_while_it_starts_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(channel: int, stderr: int, threads: int, command: Sequence[str]) -> Child:
        child = await spawn(channel, stderr, threads, command)
        child.kill(signal.SIGSTOP)
        return child

    monkeypatch.setattr(nursery_module, "spawn", stopped)
    async with asyncio.timeout(60), Router(chaos_pair(tmp_path)) as router:
        assert await answers(router) == EXPECTED


async def test_a_nursery_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery_module, "COMMAND", (*nursery_module.COMMAND[:-1], "tokenflow.nowhere"))
    with pytest.raises(WorkerDied, match=r"^the nursery \(pid \d+\) ended with exit code 1; its last words:"):
        async with Router(chaos_pair(tmp_path)):
            pass


async def test_a_nursery_without_what_workers_import_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path.cwd()}")
    with pytest.raises(WorkerDied, match=r"exit code 1; its last words:(.|\n)*this torch is broken"):
        async with asyncio.timeout(30), Router(chaos_pair(tmp_path)):
            pass


def find_nursery() -> psutil.Process:
    """The nursery among this process's children."""
    children = psutil.Process().children()
    return next(child for child in children if "tokenflow.worker.nursery" in child.cmdline())
