"""Server processes end with the comparison, however it ends, and say why they ended before."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.compare import work
from bench.compare.servers import Server, ServerFailed, open_all, program, stop_all


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Requests for a server to read."""
    path = tmp_path / "work.json"
    work.save([work.Request(5, "AB")], path)
    return path


def ends(server: Server) -> bool:
    """Whether the process is gone, and none is left of its group."""
    with pytest.raises(ProcessLookupError):
        os.killpg(server.pid, 0)
    return server.ended


def test_what_a_server_lacks_is_told(file: Path, tmp_path: Path) -> None:
    server = Server("vllm-http", Path(sys.executable), file, tmp_path / "log")
    try:
        with pytest.raises(ServerFailed, match=r"ended with code 1:[^$]*ModuleNotFoundError"):
            open_all([server], [], "float32")
        with pytest.raises(ServerFailed, match="ended with code 1"):
            server.ask(do="close")
    finally:
        stop_all([server])
    assert ends(server)


def test_none_is_left_though_one_does_not_listen_and_the_wait_is_interrupted(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [
        Server("transformers", Path(sys.executable), file, tmp_path / f"{number}.log") for number in range(2)
    ]
    os.kill(servers[0].pid, signal.SIGSTOP)

    def interrupted(server: Server, timeout: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stop_all(servers)
    assert all(ends(server) for server in servers)


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert program(str(link)) == link
    for nothing in (tmp_path, tmp_path / "none"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no program"):
            program(str(nothing))
