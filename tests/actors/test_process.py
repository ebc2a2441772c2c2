"""A worker process from start to end, with small real processes in the worker's place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from tokenflow.actors import process as process_module
from tokenflow.actors.child import spawn
from tokenflow.actors.process import WorkerProcess
from tokenflow.errors import ModelNotFound, WorkerDied
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import VERSION, Hello, Ready, Row, Step, StepDone

pytestmark = pytest.mark.anyio

HELLO = Hello(VERSION, "slm", 1, ModelConfig(path="nowhere"), (), (), 8, (0,))
READY = Ready(VERSION, 8, 64, 256, 1, 4, "", "cpu", "float32", 0.25)
STEP = Step(1, [], [], [], [Row(1, 0, 0, [1], 0)])

PREAMBLE = """
import os, signal, socket, sys, time
from tokenflow.wire.channel import WorkerChannel
from tokenflow.wire.messages import *
sock = socket.socket(fileno=int(sys.argv[1]))
channel = WorkerChannel(sock)
hello = channel.receive()
channel.send(Claim([], 0))
assert channel.receive() == Grant(None)
ready = Ready(VERSION, 8, 64, 256, 1, 4, "", "cpu", "float32", 0.25)
"""

SERVE = """
channel.send(ready)
while not isinstance(step := channel.receive(), Stop):
    channel.send(StepDone(step.id, [], [], 0.0, 0.0, 0.0, 0, 0))
"""


def worker(body: str, preamble: str = PREAMBLE) -> WorkerProcess:
    return WorkerProcess(
        HELLO, partial(spawn, command=(sys.executable, "-c", preamble + textwrap.dedent(body)))
    )


@contextlib.asynccontextmanager
async def scope(worker: WorkerProcess) -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group that ends with the worker: killed if the test did not stop it."""
    async with anyio.create_task_group() as tasks:
        yield tasks
        await worker.stop(0)
        tasks.cancel_scope.cancel()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_EXIT_GRACE_S", 0.2)


async def test_a_worker_answers_steps_and_stops_when_asked() -> None:
    slm = worker(SERVE)
    async with scope(slm) as tasks:
        assert slm.pid == 0
        assert await slm.start(tasks) == READY
        assert psutil.pid_exists(slm.pid)
        for number in (1, 2):
            assert await slm.step(Step(number, [], [], [], [])) == StepDone(number, [], [], 0, 0, 0, 0, 0)
        await slm.stop(5)
        assert not psutil.pid_exists(slm.pid)
        await _until(lambda: slm.error)
        assert "ended with exit code 0" in str(slm.error)
        assert not slm.died.is_set()


async def test_the_worker_is_told_who_it_is_and_may_use_its_threads_only() -> None:
    slm = worker("""
        facts = hello.model, hello.config.path, os.environ["OMP_NUM_THREADS"], os.getsid(0) == os.getpid()
        channel.send(Failure("EngineError", " ".join(map(str, facts)), ""))
    """)
    async with scope(slm) as tasks:
        with pytest.raises(Exception, match=r"slm nowhere 1 True"):
            await slm.start(tasks)


async def test_an_exit_code_while_loading_is_reported_with_the_last_words() -> None:
    slm = worker("""
        print("unrelated", file=sys.stderr)
        sys.stderr.write("out of memory\\nno newline at the end")
        sys.stderr.flush()
        os._exit(7)
    """)
    async with scope(slm) as tasks:
        with pytest.raises(WorkerDied) as caught:
            await slm.start(tasks)
        assert str(caught.value) == (
            f"worker of model 'slm' (pid {slm.pid}) ended with exit code 7; its last words:\n"
            "  unrelated\n  out of memory\n  no newline at the end"
        )
        assert slm.died.is_set() and slm.error is caught.value


async def test_a_signal_is_named_and_fails_the_step_in_flight() -> None:
    slm = worker(
        "channel.send(ready); channel.receive(); os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)"
    )
    async with scope(slm) as tasks:
        await slm.start(tasks)
        with pytest.raises(
            WorkerDied, match=r"^worker of model 'slm' \(pid \d+\) ended with signal 11 \(SIGSEGV\)$"
        ):
            await slm.step(STEP)


async def test_a_step_for_a_dead_worker_fails_at_once() -> None:
    slm = worker("channel.send(ready); os._exit(0)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        await slm.died.wait()
        with pytest.raises(WorkerDied, match="exit code 0"):
            await slm.step(STEP)


async def test_a_failure_of_the_worker_arrives_as_its_own_error() -> None:
    slm = worker("channel.send(Failure('ModelNotFound', 'no such directory', 'Traceback...')); sys.exit(1)")
    async with scope(slm) as tasks:
        with pytest.raises(ModelNotFound, match=r"^model 'slm': no such directory$"):
            await slm.start(tasks)


async def test_a_worker_that_reports_a_failure_and_lingers_is_killed(short_grace: None) -> None:
    slm = worker("""
        channel.send(ready)
        channel.receive()
        channel.send(Failure("EngineError", "x", ""))
        time.sleep(60)
    """)
    async with scope(slm) as tasks:
        await slm.start(tasks)
        with pytest.raises(Exception, match="model 'slm': x"):
            await slm.step(STEP)
        assert not psutil.pid_exists(slm.pid)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes was announced"),
        (b"\x00\x00\x00\x02hi", "a frame of 2 bytes is not a message"),
        (b"Segmentation fault\n", "a frame of 1399154541 bytes was announced"),
    ],
)
async def test_garbage_on_the_channel_ends_the_worker_and_is_named(
    sent: bytes, why: str, short_grace: None
) -> None:
    slm = worker(f"sock.sendall({sent!r}); time.sleep(60)")
    async with scope(slm) as tasks:
        with pytest.raises(WorkerDied, match=rf"ended with signal 9 \(SIGKILL\) after {why}"):
            await slm.start(tasks)


async def test_a_message_out_of_place_ends_the_worker(short_grace: None) -> None:
    slm = worker("channel.send(ready); channel.send(ready); time.sleep(60)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        await slm.died.wait()
        assert "after unexpected Ready from worker of model 'slm'" in str(slm.error)


async def test_a_worker_that_hangs_up_but_lives_on_is_killed(short_grace: None) -> None:
    slm = worker("sock.close(); time.sleep(60)")
    async with scope(slm) as tasks:
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await slm.start(tasks)


async def test_a_death_is_noticed_though_a_child_of_the_worker_holds_channel_and_stderr(
    short_grace: None,
) -> None:
    slm = worker("""
        channel.send(ready)
        if child := os.fork():
            print(child, file=sys.stderr, flush=True)
            os._exit(7)
        time.sleep(60)
    """)
    async with scope(slm) as tasks:
        await slm.start(tasks)
        await slm.died.wait()
        assert "exit code 7" in str(slm.error)
        os.kill(int(str(slm.error).split()[-1]), signal.SIGKILL)


async def test_an_answer_that_came_while_the_event_loop_was_held_up_is_in_time(
    event_loop: asyncio.AbstractEventLoop,
) -> None:
    slm = worker(SERVE)
    slm.hello = msgspec.structs.replace(HELLO, config=ModelConfig(path="nowhere", step_timeout=1.0))
    reading, writing = os.pipe()

    def hold_up() -> None:
        event_loop.remove_reader(reading)
        time.sleep(1.25)

    async with scope(slm) as tasks:
        await slm.start(tasks)
        event_loop.add_reader(reading, hold_up)
        answer = slm.step(STEP)
        os.write(writing, b"x")
        assert (await answer).id == STEP.id
        await slm.stop(1)
    os.close(reading)
    os.close(writing)


async def test_only_the_end_of_a_flood_on_stderr_is_kept() -> None:
    slm = worker("""
        for number in range(1000):
            print("line", number, file=sys.stderr)
        sys.stderr.write("x" * 1_000_000 + "y")
        sys.stderr.flush()
        os._exit(1)
    """)
    async with scope(slm) as tasks:
        with pytest.raises(WorkerDied) as caught:
            await slm.start(tasks)
        lines = str(caught.value).splitlines()[1:]
        assert lines[:-1] == [f"  line {number}" for number in range(961, 1000)]
        assert set(lines[-1][2:-1]) == {"x"} and lines[-1].endswith("y")
        assert len(lines[-1]) < 5000


async def test_of_a_flood_only_the_beginning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    slm = worker("""
        text = "".join(f"line {number}\\n" for number in range(50_000))
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(1)
    """)
    async with scope(slm) as tasks:
        with pytest.raises(WorkerDied) as caught:
            await slm.start(tasks)
    assert str(caught.value).splitlines()[1:] == [f"  line {number}" for number in range(49_960, 50_000)]
    logged = [record.message for record in caplog.records if record.name == "tokenflow.worker"]
    lines = [line for line in logged if " line " in line]
    assert lines[:3] == ["[slm] line 0", "[slm] line 1", "[slm] line 2"]
    assert 1000 <= len(lines) < 10_000
    withheld = [int(re.search(r"\.\.\. and (\d+) more lines", line)[1]) for line in logged if "more" in line]
    assert sum(withheld) + len(lines) == 50_000


async def test_stderr_that_is_no_text_is_reported_all_the_same() -> None:
    slm = worker("os.write(2, b'\\xff\\xfe broken\\n'); os._exit(1)")
    async with scope(slm) as tasks:
        with pytest.raises(WorkerDied, match="\ufffd\ufffd broken"):
            await slm.start(tasks)


async def test_a_worker_that_is_stopped_ends_when_it_is_asked_to() -> None:
    slm = worker(SERVE)
    async with scope(slm) as tasks:
        await slm.start(tasks)
        os.kill(slm.pid, signal.SIGSTOP)
        with anyio.fail_after(5):
            await slm.stop(60)
        assert slm._child is not None and slm._child.code == 0


async def test_a_worker_deaf_to_stop_is_terminated() -> None:
    slm = worker("channel.send(ready); time.sleep(60)")
    async with scope(slm) as tasks:
        await slm.start(tasks)
        await slm.stop(0.05)
        assert not psutil.pid_exists(slm.pid)


async def test_a_worker_deaf_to_termination_is_killed_with_all_it_started() -> None:
    slm = worker("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            channel.send(Ready(VERSION, 8, 64, 256, 1, child, "", "cpu", "float32", 0.25))
        time.sleep(60)
    """)
    async with scope(slm) as tasks:
        ready = await slm.start(tasks)
        child = psutil.Process(ready.max_requests)
        await slm.stop(0.05)
        assert not psutil.pid_exists(slm.pid)
        await _until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_kill_ends_a_worker_that_is_loading() -> None:
    slm = worker("time.sleep(60)")
    async with scope(slm) as tasks:
        async with anyio.create_task_group() as starting:
            starting.start_soon(_start_is_refused, slm, tasks)
            await _until(lambda: slm.pid != 0)
            slm.kill()
        assert not slm.died.is_set()


async def test_kill_before_the_process_exists_ends_it_as_soon_as_it_does() -> None:
    slm = worker("time.sleep(60)", preamble="import time\n")
    async with scope(slm) as tasks, anyio.create_task_group() as starting:
        starting.start_soon(_start_is_refused, slm, tasks)
        await anyio.lowlevel.checkpoint()
        slm.kill()
        assert slm.pid == 0


async def _start_is_refused(worker: WorkerProcess, tasks: anyio.abc.TaskGroup) -> None:
    with anyio.fail_after(10), pytest.raises(WorkerDied, match="ended with"):
        await worker.start(tasks)


async def _until(true: Callable[[], object]) -> None:
    with anyio.fail_after(5):
        while not true():
            await anyio.lowlevel.checkpoint()


async def test_a_start_that_is_cancelled_anywhere_leaves_nothing_behind() -> None:
    counts = []
    for turns in (100, *range(12), 400):
        slm = worker("time.sleep(60)", preamble="import time\n")
        async with scope(slm) as tasks, anyio.create_task_group() as starting:
            starting.start_soon(slm.start, tasks)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            starting.cancel_scope.cancel()
        assert psutil.Process().children() == []
        counts.append(_open_files())
    assert set(counts[1:]) == {counts[0]}


async def test_a_command_that_does_not_exist_fails_the_start() -> None:
    slm = WorkerProcess(HELLO, partial(spawn, command=("/nonexistent/python",)))
    async with scope(slm) as tasks:
        with pytest.raises(FileNotFoundError):
            await slm.start(tasks)


async def test_starts_and_ends_leak_no_descriptor() -> None:
    counts = []
    for _ in range(3):
        slm = worker(SERVE)
        async with scope(slm) as tasks:
            await slm.start(tasks)
        counts.append(_open_files())
    # The first round may open what the event loop keeps.
    assert counts[1] == counts[2]


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
