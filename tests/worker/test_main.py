"""A real worker process goes with its router, whatever it is doing, and never before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenflow.settings import worker_environment
from tokenflow.types import ModelConfig, SamplingParams
from tokenflow.wire.channel import FrameReader, decode_to_router, encode
from tokenflow.wire.messages import (
    VERSION,
    Claim,
    Failure,
    Grant,
    Hello,
    Open,
    Ready,
    Row,
    Step,
    StepDone,
    Stop,
    ToRouter,
    ToWorker,
)

GONE_S = 3.0
ENGINE = """
import os, pathlib, sys, time
from tests.toy.engine import ToyEngine

def engine(config):
    print("a line on stdout")
    print("inheritable:", os.get_inheritable(int(sys.argv[1])))
    return ToyEngine(config)

def loads_for_ever(config):
    pathlib.Path(config.path, "loading").touch()
    time.sleep(60)

class StepsForEver(ToyEngine):
    def __init__(self, config):
        super().__init__(config)
        self.path = pathlib.Path(config.path)

    def step(self, extends):
        (self.path / "stepping").touch()
        time.sleep(60)
"""


class RealWorker:
    """A worker process, and the router's end of its socketpair."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reader = FrameReader()
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenflow.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**worker_environment(1), "PYTHONPATH": str(Path(__file__).parents[2])},
            )

    def hello(self, engine: str, version: int = VERSION) -> None:
        file = self._directory / "engines.py"
        file.write_text(ENGINE)
        config = ModelConfig(path=str(self._directory), engine=f"{file}:{engine}")
        self.send(Hello(version, "toy", 1, config, (), (), 128, (2,)))
        self.send(Grant(None))

    def send(self, message: ToWorker) -> None:
        self.socket.sendall(encode(message))

    def receive(self) -> ToRouter:
        """The next message that is no claim."""
        while data := self.socket.recv(1 << 16):
            messages = [decode_to_router(payload) for payload in self._reader.feed(data)]
            if said := [message for message in messages if not isinstance(message, Claim)]:
                (message,) = said
                return message
        raise EOFError

    def exit_code(self) -> int:
        """The exit code, once the process has gone in time."""
        return self.process.wait(timeout=GONE_S)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RealWorker]:
    worker = RealWorker(tmp_path)
    with worker.process, worker.socket:
        yield worker
        worker.process.kill()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_worker_whose_router_is_gone_before_it_began_goes(worker: RealWorker) -> None:
    worker.socket.close()
    assert worker.exit_code() == 3


def test_a_worker_whose_router_goes_while_it_imports_goes(worker: RealWorker) -> None:
    worker.hello("engine")
    maps = Path(f"/proc/{worker.process.pid}/maps")
    until(lambda: "libtorch" in maps.read_text())
    worker.socket.close()
    assert worker.exit_code() == 3


def test_a_worker_whose_router_goes_while_it_loads_goes(worker: RealWorker, tmp_path: Path) -> None:
    worker.hello("loads_for_ever")
    until((tmp_path / "loading").exists)
    worker.socket.close()
    assert worker.exit_code() == 3


def test_a_worker_whose_router_goes_during_a_step_goes(worker: RealWorker, tmp_path: Path) -> None:
    worker.hello("StepsForEver")
    assert isinstance(worker.receive(), Ready)
    worker.send(Step(1, [], [Open(1, 0, 1, 0, SamplingParams(), ())], [], [Row(1, 0, 0, [5], 0)]))
    until((tmp_path / "stepping").exists)
    worker.socket.close()
    assert worker.exit_code() == 3


def test_a_worker_serves_until_it_is_told_to_stop(worker: RealWorker) -> None:
    worker.hello("engine")
    assert isinstance(worker.receive(), Ready)
    worker.process.send_signal(signal.SIGINT)
    worker.send(Step(1, [], [Open(1, 0, 1, 0, SamplingParams(), ())], [], [Row(1, 0, 0, [5], 0)]))
    done = worker.receive()
    assert isinstance(done, StepDone)
    assert [(row.handle, row.position) for row in done.rows] == [(1, 1)]
    worker.send(Stop())
    assert worker.exit_code() == 0
    out, err = worker.process.communicate()
    assert out == ""
    assert "a line on stdout" in err
    assert "inheritable: False" in err


def test_a_worker_of_another_version_says_so(worker: RealWorker) -> None:
    worker.hello("engine", version=VERSION + 1)
    failure = worker.receive()
    assert isinstance(failure, Failure)
    assert failure.kind == "ProtocolError"
    assert f"this worker speaks version {VERSION}" in failure.message
    assert worker.exit_code() == 1
