"""The nursery forks workers that are as good as spawned ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import psutil
import pytest

from tests.recipes import ENGINE
from tokenflow.actors.child import Child
from tokenflow.actors.nursery import COMMAND, Nursery, _Process
from tokenflow.actors.process import WorkerProcess
from tokenflow.errors import WorkerDied
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import VERSION, Hello

pytestmark = pytest.mark.anyio

GONE_S = 3.0


@pytest.fixture(scope="module")
async def nursery() -> AsyncIterator[Nursery]:
    nursery = Nursery()
    await nursery.warm_up()
    yield nursery
    await nursery.stop()


def hello(folder: Path, threads: int = 1) -> Hello:
    config = ModelConfig(path=str(folder), engine=ENGINE, threads=threads)
    return Hello(VERSION, "toy", 1, config, (), (), 8, (0,))


async def test_forked_workers_answer_and_end_as_asked(nursery: Nursery, tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        workers = [WorkerProcess(hello(tmp_path), nursery.launch) for _ in range(3)]
        for worker in workers:
            assert (await worker.start(tasks)).device == "cpu"
        processes = [psutil.Process(worker.pid) for worker in workers]
        assert {process.ppid() for process in processes} == {nursery.pid}
        assert [os.getpgid(process.pid) for process in processes] == [process.pid for process in processes]
        os.kill(workers[0].pid, signal.SIGSEGV)
        await workers[0].died.wait()
        assert "ended with signal 11 (SIGSEGV)" in str(workers[0].error)
        assert "Fatal Python error: Segmentation fault" in str(workers[0].error)
        for worker in workers[1:]:
            await worker.stop(5)
        assert not any(process.is_running() for process in processes)
        tasks.cancel_scope.cancel()


async def test_a_worker_holds_its_own_channel_and_no_other(nursery: Nursery, tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        workers = [WorkerProcess(hello(tmp_path), nursery.launch) for _ in range(3)]
        for worker in workers:
            await worker.start(tasks)
        sockets = [_sockets(worker.pid) for worker in workers]
        assert [len(held) for held in sockets] == [1, 1, 1]
        assert len(set.union(*sockets)) == 3
        assert len(_sockets(nursery.pid)) == 1
        for worker in workers:
            await worker.stop(5)
        tasks.cancel_scope.cancel()


async def test_a_worker_may_use_its_own_number_of_threads(nursery: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import os, torch\n"
        "def tell(config):\n"
        "    raise RuntimeError(f\"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}\")\n"
    )
    config = ModelConfig(path=str(tmp_path), engine=f"{script}:tell", threads=2)
    worker = WorkerProcess(Hello(VERSION, "toy", 1, config, (), (), 8, (0,)), nursery.launch)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(Exception, match="2 2"):
            await worker.start(tasks)
        await worker.stop(5)
        tasks.cancel_scope.cancel()


async def test_a_launch_that_is_cancelled_leaves_no_worker(nursery: Nursery) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as stderr:

        async def launch() -> None:
            # One that was there before it was cancelled is its caller's.
            (await nursery.launch(theirs.fileno(), stderr.fileno(), 1)).kill_group(signal.SIGKILL)

        for turns in range(6):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(launch)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        child = await nursery.launch(theirs.fileno(), stderr.fileno(), 1)
        theirs.close()
        await _until_only(nursery, child)
    await child.wait()


async def test_a_launch_that_is_cancelled_when_its_worker_is_born_leaves_none(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as stderr:
        arguments = (theirs.fileno(), stderr.fileno(), 1)
        first = await nursery.launch(*arguments)
        loop, launch = asyncio.get_running_loop(), asyncio.ensure_future(nursery.launch(*arguments))
        with monkeypatch.context() as patch:
            patch.setattr(_Process, "_watch", lambda *_: loop.call_soon(launch.cancel))
            with pytest.raises(asyncio.CancelledError):
                await launch
        await _until_only(nursery, first)
        first.kill_group(signal.SIGKILL)
    await first.wait()


async def test_a_nursery_that_is_lost_takes_its_workers_along_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery = Nursery()
    async with anyio.create_task_group() as tasks:
        worker = WorkerProcess(hello(tmp_path), nursery.launch)
        await worker.start(tasks)
        first = nursery.pid
        os.kill(first, signal.SIGKILL)
        await worker.died.wait()
        assert "ended with an exit code that nobody saw" in str(worker.error)
        other = WorkerProcess(hello(tmp_path), nursery.launch)
        await other.start(tasks)
        assert nursery.pid != first
        await other.stop(5)
        await nursery.stop()
        tasks.cancel_scope.cancel()


async def test_a_nursery_that_does_not_fork_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow.actors.nursery._BIRTH_S", 0.2)
    _teach(monkeypatch, "_fork", "time.sleep(600)")
    nursery = Nursery()
    async with anyio.create_task_group() as tasks:
        said = r"^the nursery \(pid \d+\) ended with signal 9 \(SIGKILL\) after 0.2 s in which no worker"
        with pytest.raises(WorkerDied, match=said):
            await WorkerProcess(hello(tmp_path), nursery.launch).start(tasks)
        await nursery.stop()
        tasks.cancel_scope.cancel()


async def test_a_nursery_that_does_not_get_warm_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.actors.nursery._WARM_S", 0.1)
    _teach(monkeypatch, "warm_up", "time.sleep(600)")
    nursery = Nursery()
    with pytest.raises(WorkerDied, match=r"signal 9 \(SIGKILL\) after 0.1 s in which it was not ready$"):
        await nursery.warm_up()
    await nursery.stop()


async def test_the_end_of_a_worker_is_seen_though_the_nursery_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _teach(monkeypatch, "_bury", "None")
    nursery = Nursery()
    async with anyio.create_task_group() as tasks:
        workers = [WorkerProcess(hello(tmp_path), nursery.launch) for _ in range(2)]
        for worker in workers:
            await worker.start(tasks)
        with anyio.fail_after(4):
            os.kill(workers[0].pid, signal.SIGKILL)
            await workers[0].died.wait()
            assert "ended with an exit code that nobody saw" in str(workers[0].error)
            await workers[1].stop(5)
        await nursery.stop()
        tasks.cancel_scope.cancel()


async def test_a_nursery_that_was_stopped_goes_on(tmp_path: Path) -> None:
    nursery = Nursery()
    async with anyio.create_task_group() as tasks:
        worker = WorkerProcess(hello(tmp_path), nursery.launch)
        await worker.start(tasks)
        pid = nursery.pid
        os.kill(pid, signal.SIGSTOP)
        os.kill(worker.pid, signal.SIGKILL)
        await worker.died.wait()
        assert "ended with signal 9 (SIGKILL)" in str(worker.error)
        other = WorkerProcess(hello(tmp_path), nursery.launch)
        await other.start(tasks)
        assert nursery.pid == pid
        await other.stop(5)
        await nursery.stop()
        tasks.cancel_scope.cancel()


async def test_forks_and_ends_leak_no_descriptor(nursery: Nursery, tmp_path: Path) -> None:
    counts = []
    for _ in range(3):
        async with anyio.create_task_group() as tasks:
            worker = WorkerProcess(hello(tmp_path), nursery.launch)
            await worker.start(tasks)
            os.kill(worker.pid, signal.SIGKILL)
            await worker.died.wait()
            tasks.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()
        counts.append(_open_files())
    assert counts[1] == counts[2]


@pytest.mark.parametrize("warm", [False, True])
def test_a_nursery_goes_with_its_router(warm: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [*COMMAND, str(theirs.fileno()), str(os.getpid())], pass_fds=(theirs.fileno(),)
        )
    with ours:
        if warm:
            assert ours.recv(100)
    started = time.monotonic()
    process.wait(GONE_S)
    assert time.monotonic() - started < GONE_S


def _teach(monkeypatch: pytest.MonkeyPatch, method: str, does: str) -> None:
    """Nurseries that start from now on do something else, as if they hung."""
    script = (
        "import sys, time\n"
        "from tokenflow.worker import nursery\n"
        f"nursery.Nursery.{method} = lambda self: {does}\n"
        "nursery.prepare()\n"
        "fd, pid = map(int, sys.argv[1:])\n"
        "it = nursery.Nursery(nursery.socket.socket(fileno=fd), nursery.Parent(pid))\n"
        "it.warm_up()\n"
        "it.serve()\n"
    )
    monkeypatch.setattr("tokenflow.actors.nursery.COMMAND", (sys.executable, "-c", script))


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return {link for link in links if link.startswith("socket:")}


async def _until_only(nursery: Nursery, child: Child) -> None:
    with anyio.fail_after(GONE_S):
        while {process.pid for process in psutil.Process(nursery.pid).children()} - {child.pid}:
            await anyio.lowlevel.checkpoint()
