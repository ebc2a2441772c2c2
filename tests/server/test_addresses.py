"""Where ``tokenflow serve`` listens: ports, Unix sockets, and files that run out."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import socket
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import pytest

from tests.server.client import Exchange
from tests.server.process import SHORT, body_of, client_of, running, workers_of
from tokenflow.limits import raise_file_limit
from tokenflow.server.files import Connections
from tokenflow.server.listening import listening
from tokenflow.server.options import Options

pytestmark = pytest.mark.anyio


def test_a_server_may_open_as_many_files_as_its_user() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 50
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        most = raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == limits[1]
        assert few < soft <= hard
        assert most == soft == raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_crowd_is_told_of_once_until_it_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    connections = Connections(4)
    answers = [connections.fit(count) for count in (1, 4, 5, 6, 4, 5, 2, 3, 5)]
    assert answers == [True, True, False, False, True, False, True, True, False]
    assert [record.getMessage() for record in caplog.records] == [
        "4 connections are open; more are closed at once (see ulimit -n)"
    ] * 2


async def test_clients_that_take_every_connection_leave_workers_what_they_need_to_be_replaced() -> None:
    """Beyond, connections are closed; those that are open go on, and nothing is busy for nothing."""
    async with running(by=["bash", "-c", 'ulimit -n 80; exec "$@"', "bash"]) as server:
        client = await client_of(server)
        async with AsyncExitStack() as stack:
            stream = await stack.enter_async_context(client.open("POST", "/v1/completions", SHORT))
            assert await stream.head() == 200
            crowd = [await stack.enter_async_context(client.connect()) for _ in range(100)]
            for one in crowd:
                one.ask("GET", "/health")
            taken = sum(await asyncio.gather(*(answered(one) for one in crowd)))
            assert taken == 80 - 48 - 1
            for worker in workers_of(server):
                worker.kill()
            body = await body_of(stream)
        assert body.count(b'"finish_reason":"length"') == 1
        assert (await client.get("/health")).status == 200
        assert await client.metric("worker_restarts_total") == 2
        server.process.send_signal(signal.SIGTERM)
        code, said = await server.end()
    assert code == 0, said
    assert said.count("more are closed at once") == 1
    assert "Traceback" not in said


async def answered(exchange: Exchange) -> bool:
    """Whether a connection was taken."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        return await exchange.head() == 200
    return False


async def test_with_next_to_no_files_nothing_is_begun() -> None:
    async with running(by=["bash", "-c", 'ulimit -n 50; exec "$@"', "bash"]) as server:
        code, said = await server.end()
    assert code == 1
    assert said == (
        "tokenflow serve: this process may have 50 files open, which is too few for 2 models and their "
        "clients; allow it 56 or more (ulimit -n)\n"
    )


async def test_an_address_in_use_is_found_before_anything_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with running("--port", str(port)) as server:
            code, said = await server.end()
    assert code == 1
    assert said == (
        f"tokenflow serve: cannot listen at 127.0.0.1:{port}: Address already in use; choose another --port\n"
    )


async def test_the_socket_that_a_killed_server_has_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    async with running("--uds", str(path)) as server:
        await server.until("loading")
        reader, writer = await asyncio.open_unix_connection(path)
        exchange = Exchange(reader, writer)
        exchange.ask("GET", "/health")
        assert (await exchange.reply()).error["code"] == "not_ready"
        writer.close()
        server.process.send_signal(signal.SIGTERM)
        code, said = await server.end()
    assert code == 130, said
    assert not path.exists()


@pytest.mark.parametrize("kind", ["server", "full server", "file", "folder", "dangling link"])
def test_nothing_else_is_taken_over(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as waiting:
        if kind.endswith("server"):
            other.bind(str(path))
            other.listen(0)
            if kind == "full server":
                waiting.connect(str(path))
        elif kind == "file":
            path.write_text("precious")
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(tmp_path / "gone")
        before = path.lstat()
        expected = f"cannot listen at {path}: Address already in use; choose another --uds"
        with pytest.raises(OSError, match=re.escape(expected)), listening(Options(uds=str(path))):
            pass
        assert path.lstat().st_ino == before.st_ino


def test_a_server_that_ends_leaves_the_socket_of_the_one_that_has_taken_its_place(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    chosen = Options(uds=str(path))
    with ExitStack() as following:
        with listening(chosen) as (ending, _):
            ending.close()
            following.enter_context(listening(chosen))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()
