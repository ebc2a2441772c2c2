"""Both ends of a channel over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import anyio
import pytest
from anyio import to_thread

from tokenflow.errors import ProtocolError
from tokenflow.wire.channel import Channel, WorkerChannel, encode
from tokenflow.wire.messages import Failure, Score, Scored, Step, Stop, ToRouter

pytestmark = pytest.mark.anyio

FIRST, SECOND = Scored(1, [-0.5], [[]]), Failure("EngineError", "x", "")
GARBAGE = b"\x00\x00\x00\x05hello"


class Recorder:
    """A receiver that notes what it gets."""

    def __init__(self, refuse: type[ToRouter] | None = None) -> None:
        self.messages: asyncio.Queue[ToRouter] = asyncio.Queue()
        self.ends: list[Exception | None] = []
        self.ended = asyncio.Event()
        self._refuse = refuse

    def received(self, message: ToRouter) -> None:
        if self._refuse is not None and isinstance(message, self._refuse):
            raise ProtocolError("unexpected")
        self.messages.put_nowait(message)

    def closed(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.ended.set()


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The router's and the worker's end; the router's is handed to its channel."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(5)
    with theirs:
        yield ours, theirs
    ours.close()


Sockets = tuple[socket.socket, socket.socket]


async def test_messages_cross_in_both_directions_in_order(sockets: Sockets) -> None:
    ours, theirs = sockets
    recorder, worker = Recorder(), WorkerChannel(theirs)
    channel = await Channel.connect(ours, recorder)
    channel.send(Score(1, [1, 2], 0))
    channel.send(Stop())
    assert await to_thread.run_sync(worker.receive) == Score(1, [1, 2], 0)
    assert await to_thread.run_sync(worker.receive) == Stop()
    theirs.sendall(encode(FIRST) + encode(SECOND))
    assert await recorder.messages.get() == FIRST
    assert await recorder.messages.get() == SECOND
    channel.close()
    await recorder.ended.wait()
    assert recorder.ends == [None]


async def test_a_message_that_arrives_byte_by_byte_is_read(sockets: Sockets) -> None:
    ours, theirs = sockets
    recorder = Recorder()
    channel = await Channel.connect(ours, recorder)
    for byte in encode(FIRST):
        theirs.sendall(bytes([byte]))
        await anyio.lowlevel.checkpoint()
    assert await recorder.messages.get() == FIRST
    channel.close()
    await recorder.ended.wait()


async def test_messages_larger_than_any_buffer_cross(sockets: Sockets) -> None:
    ours, theirs = sockets
    recorder, worker = Recorder(), WorkerChannel(theirs)
    channel = await Channel.connect(ours, recorder)
    asked = Score(1, list(range(1_000_000)), 0)
    answer = Scored(1, [-0.5] * 500_000, [])

    def serve() -> None:
        assert worker.receive() == asked
        worker.send(answer)

    async with anyio.create_task_group() as tasks:
        channel.send(asked)
        tasks.start_soon(to_thread.run_sync, serve)
        assert await recorder.messages.get() == answer
    channel.close()
    await recorder.ended.wait()


async def test_the_end_of_file_of_a_worker_is_its_end(sockets: Sockets) -> None:
    ours, theirs = sockets
    recorder = Recorder()
    await Channel.connect(ours, recorder)
    theirs.sendall(encode(FIRST))
    theirs.close()
    with anyio.fail_after(5):
        await recorder.ended.wait()
    assert recorder.messages.get_nowait() == FIRST
    assert recorder.ends == [None]


async def test_half_a_message_before_the_end_of_file_is_not_a_message(sockets: Sockets) -> None:
    ours, theirs = sockets
    recorder = Recorder()
    await Channel.connect(ours, recorder)
    theirs.sendall(encode(FIRST)[:-1])
    theirs.close()
    with anyio.fail_after(5):
        await recorder.ended.wait()
    assert recorder.messages.empty()
    assert recorder.ends == [None]


async def test_a_worker_that_leaves_without_reading_is_gone_all_the_same(sockets: Sockets) -> None:
    """Unread bytes turn the end of file into a connection reset; what it had sent still counts."""
    ours, theirs = sockets
    recorder = Recorder()
    channel = await Channel.connect(ours, recorder)
    channel.send(Stop())
    await to_thread.run_sync(lambda: theirs.recv(1, socket.MSG_PEEK))
    theirs.sendall(encode(SECOND))
    theirs.close()
    with anyio.fail_after(5):
        await recorder.ended.wait()
    assert recorder.messages.get_nowait() == SECOND
    assert len(recorder.ends) == 1
    assert recorder.ends[0] is None or isinstance(recorder.ends[0], ConnectionError)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (GARBAGE, "a frame of 5 bytes is not a message"),
        (b"\x7f\xff\xff\xff", "a frame of 2147483647 bytes was announced"),
        (encode(Stop()), "a frame of 11 bytes is not a message"),
    ],
    ids=["no message", "impossible length", "message of the router"],
)
async def test_garbage_closes_the_channel_after_what_came_before_it(
    sockets: Sockets, sent: bytes, why: str
) -> None:
    ours, theirs = sockets
    recorder = Recorder()
    channel = await Channel.connect(ours, recorder)
    theirs.sendall(encode(FIRST) + sent + encode(SECOND))
    with anyio.fail_after(5):
        await recorder.ended.wait()
    assert recorder.messages.get_nowait() == FIRST
    assert recorder.messages.empty()
    assert [str(end)[: len(why)] for end in recorder.ends] == [why]
    assert isinstance(recorder.ends[0], ProtocolError)
    assert await to_thread.run_sync(lambda: theirs.recv(1)) == b""
    channel.send(Stop())


async def test_a_message_that_its_receiver_refuses_closes_the_channel(sockets: Sockets) -> None:
    ours, theirs = sockets
    recorder = Recorder(refuse=Failure)
    await Channel.connect(ours, recorder)
    theirs.sendall(encode(FIRST) + encode(SECOND) + encode(FIRST))
    with anyio.fail_after(5):
        await recorder.ended.wait()
    assert recorder.messages.qsize() == 1
    assert [str(end) for end in recorder.ends] == ["unexpected"]


async def test_nothing_is_received_after_close(sockets: Sockets) -> None:
    ours, theirs = sockets
    recorder = Recorder()
    channel = await Channel.connect(ours, recorder)
    theirs.sendall(encode(FIRST))
    channel.close()
    channel.close()
    with anyio.fail_after(5):
        await recorder.ended.wait()
    assert recorder.ends == [None]
    assert recorder.messages.empty()
    channel.send(Stop())
    channel.close()


async def test_close_does_not_wait_for_a_worker_that_has_stopped_reading(sockets: Sockets) -> None:
    ours, _ = sockets
    recorder = Recorder()
    channel = await Channel.connect(ours, recorder)
    channel.send(Score(1, list(range(1_000_000)), 0))
    channel.close()
    with anyio.fail_after(5):
        await recorder.ended.wait()
    assert recorder.ends == [None]


def test_a_worker_sees_that_the_router_is_gone(sockets: Sockets) -> None:
    ours, theirs = sockets
    worker = WorkerChannel(theirs)
    ours.sendall(encode(Stop()) + encode(Stop())[:3])
    ours.close()
    assert worker.receive() == Stop()
    with pytest.raises(EOFError):
        worker.receive()
    with pytest.raises(ConnectionError):
        worker.send(FIRST)


def test_a_worker_sees_that_the_router_left_without_reading(sockets: Sockets) -> None:
    ours, theirs = sockets
    worker = WorkerChannel(theirs)
    worker.send(FIRST)
    ours.close()
    with pytest.raises(EOFError):
        worker.receive()


def test_a_worker_gets_every_message_of_one_read_in_order(sockets: Sockets) -> None:
    ours, theirs = sockets
    worker = WorkerChannel(theirs)
    steps = [Step(number, [], [], [], []) for number in range(50)]
    ours.sendall(b"".join(map(encode, steps)))
    assert [worker.receive() for _ in steps] == steps


@pytest.mark.parametrize("sent", [GARBAGE, b"\xff\xff\xff\xff", encode(FIRST)])
def test_a_worker_refuses_garbage(sockets: Sockets, sent: bytes) -> None:
    ours, theirs = sockets
    ours.sendall(sent)
    with pytest.raises(ProtocolError):
        WorkerChannel(theirs).receive()
