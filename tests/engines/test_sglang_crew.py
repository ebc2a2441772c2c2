"""Ranks of a model in lock step: orders, and what the death of one means to the others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines.fake_rank import COMMAND, crew_of
from tokenflow.engines.sglang.load import place_of, server_arguments
from tokenflow.engines.sglang.orders import (
    Copy,
    Embed,
    Inbox,
    Leave,
    Load,
    Map,
    Order,
    PutBack,
    Run,
    SetAside,
    encode,
)
from tokenflow.errors import ModelLoadError
from tokenflow.settings import SGLANG_CORES
from tokenflow.types import ModelConfig

ORDERS: list[Order] = [
    Map(1, 16, [32, 33]),
    Run([1, 2], [0, 5], [2, 1], [7, 8, 9], [16, 17, 40], None),
    Run([3], [0], [2], [7, 8], [48, 49], [0, 1]),
    Copy([16], [32]),
    SetAside([16, 17]),
    PutBack(),
    Embed(),
]


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each of three ranks, which share it."""
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv(SGLANG_CORES, f"{core}|{core}|{core}")


def test_an_order_is_the_same_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = Inbox(theirs)
        sent = [Load(ModelConfig(path="x", tensor_parallel=2), 1, 4321, True, "dummy"), *ORDERS, Leave()]
        ours.sendall(b"".join(map(encode, sent)))
        assert [inbox.receive() for _ in sent] == sent
        ours.close()
        with pytest.raises(EOFError):
            inbox.receive()


def test_every_rank_carries_out_the_same_orders_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow.engines.sglang.crew._LEAVE_S", 60)
    crew = crew_of(tmp_path, 3)
    for order in ORDERS:
        crew.do(order)
    crew.close()
    written = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(3)]
    pids = [int(lines[0]) for lines in written]
    assert pids[0] == os.getpid()
    assert len(set(pids)) == 3
    assert written[0][1:] == written[1][1:] == written[2][1:] == [str(order) for order in ORDERS]
    assert not any(psutil.pid_exists(pid) for pid in pids[1:])


@pytest.fixture
def first(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A first rank of two, as a process."""
    process = subprocess.Popen(
        [*COMMAND, "first", "2", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    _tell(process, 1)
    yield process
    process.kill()
    process.communicate()


def _tell(process: subprocess.Popen[str], source: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{source}\n")
    process.stdin.flush()


def _second(folder: Path) -> psutil.Process:
    """The second rank, once it has carried out an order."""
    file = folder / "rank1"
    while not file.exists() or file.read_text().count("\n") < 2:
        os.sched_yield()
    return psutil.Process(int(file.read_text().split()[0]))


def test_no_rank_goes_on_without_the_others(first: subprocess.Popen[str], tmp_path: Path) -> None:
    _second(tmp_path)
    _tell(first, 666)
    assert first.wait(30) == 4
    _, words = first.communicate()
    assert "a tensor-parallel rank is gone" in words


def test_the_other_ranks_leave_with_the_first(first: subprocess.Popen[str], tmp_path: Path) -> None:
    second = _second(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    _, alive = psutil.wait_procs([second], timeout=30)
    assert not alive


def test_a_rank_that_is_stopped_leaves_with_the_first_too(
    first: subprocess.Popen[str], tmp_path: Path
) -> None:
    second = _second(tmp_path)
    second.suspend()
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    _, alive = psutil.wait_procs([second], timeout=30)
    for process in alive:
        process.kill()
    assert not alive


def test_a_cache_that_is_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="kv_cache of 15 tokens is too small: a block has 16"):
        server_arguments(ModelConfig(path="x", kv_cache=15, dtype="float32"), "cpu", False, "auto")


def test_ranks_that_have_no_device_are_told_before_any_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="rank 1 needs CUDA device 1, and this machine has 0 of them"):
        place_of("cuda", 1)
    assert place_of("cpu", 2) == ("cpu", 2)
