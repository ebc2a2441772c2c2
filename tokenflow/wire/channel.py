"""Frames over an inherited socketpair: four bytes of length (big endian), then one MessagePack message.

End-of-file in either direction *is* the death of the other side; there is no other signal to miss.  The
router's end is an :class:`asyncio.Protocol` (the cheapest way through an event loop), the worker's end
blocks.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar, cast

import msgspec

from tokenflow.errors import ProtocolError, TokenflowError
from tokenflow.wire.messages import ToRouter, ToWorker

MAX_FRAME = 256 * 1024 * 1024
"""Longest payload in bytes; a longer announcement is garbage, not a message."""

_T = TypeVar("_T")

_HEADER = 4
_READ = 1 << 18

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_router = msgspec.msgpack.Decoder(ToRouter)


def encode(message: ToWorker | ToRouter) -> bytes:
    """One frame: header and payload."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(_HEADER) + payload


def decode_to_worker(payload: bytes) -> ToWorker:
    """Read a message of the router; :raises ProtocolError: if it is not one."""
    return _decode(_to_worker.decode, payload)


def decode_to_router(payload: bytes) -> ToRouter:
    """Read a message of a worker; :raises ProtocolError: if it is not one."""
    return _decode(_to_router.decode, payload)


def _decode(decode: Callable[[bytes], _T], payload: bytes) -> _T:
    try:
        return decode(payload)
    except (msgspec.MsgspecError, TokenflowError, RecursionError) as error:
        raise ProtocolError(f"a frame of {len(payload)} bytes is not a message: {error}") from None


class FrameReader:
    """Cuts a byte stream into payloads, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads that ``data`` completes; :raises ProtocolError: on an impossible length."""
        buffer = self._buffer
        if not buffer and len(data) == _HEADER + int.from_bytes(data[:_HEADER]):
            yield data[_HEADER:]
            return
        buffer += data
        start, end = 0, len(buffer)
        while end - start >= _HEADER:
            size = int.from_bytes(buffer[start : start + _HEADER], "big")
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes was announced, the limit is {MAX_FRAME}")
            if end - start - _HEADER < size:
                break
            yield bytes(buffer[start + _HEADER : start + _HEADER + size])
            start += _HEADER + size
        del buffer[:start]


class Receiver(Protocol):
    """Who gets what arrives at the router's end of a channel."""

    def received(self, message: ToRouter) -> None:
        """A message came."""

    def closed(self, error: Exception | None) -> None:
        """The other side is gone, or sent garbage (``error``); nothing follows."""


class Channel(asyncio.Protocol):
    """The router's end of a channel to one worker."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None

    @classmethod
    async def connect(cls, sock: socket.socket, receiver: Receiver) -> Channel:
        """Take over the connected socket ``sock``."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(receiver), sock=sock)
        return channel

    def send(self, message: ToWorker) -> None:
        """Queue a message; sending to a worker that is gone does nothing (``closed`` tells)."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        """Hang up; the worker sees end-of-file."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Frames are sent when they are written, not when the event loop has nothing else to do.
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._receiver.received(decode_to_router(payload))
        except ProtocolError as error:
            self._error = error
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._receiver.closed(self._error or exc)


class WorkerChannel:
    """The worker's end of a channel: blocking calls on a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()
        self._payloads: list[bytes] = []
        # One buffer for all that comes: a new one of this size would be mapped and unmapped every time.
        self._buffer = memoryview(bytearray(_READ))
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def send(self, message: ToRouter) -> None:
        """Send a message; :raises ConnectionError: if the router is gone."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message; :raises ConnectionError: if the router is gone."""
        self._socket.sendall(frame)

    def receive(self, awake_s: float = 0.0) -> ToWorker:
        """Wait for the next message.

        :param awake_s: poll for so long before going to sleep: waking up takes 50 to 150 us.
        :raises EOFError: if the router is gone.
        :raises ProtocolError: on garbage.
        """
        if awake_s and not self._payloads:
            self._stay_awake(awake_s)
        while not self._payloads:
            self._read()
        return decode_to_worker(self._payloads.pop(0))

    def waiting(self) -> bool:
        """Whether there is (the beginning of) a message: asked without waiting.

        :raises EOFError: if the router is gone.
        """
        if not self._payloads and self._readable.poll(0):
            self._read()
            return True
        return bool(self._payloads)

    def _read(self) -> None:
        """Take what is there, or what comes next."""
        try:
            count = self._socket.recv_into(self._buffer)
        except ConnectionError:  # the router left without reading what we had sent
            count = 0
        if not count:
            raise EOFError
        self._payloads.extend(self._reader.feed(bytes(self._buffer[:count])))

    def _stay_awake(self, seconds: float) -> None:
        """Poll until there is something to read, or the time is over."""
        end = time.monotonic() + seconds
        while not self._readable.poll(0) and time.monotonic() < end:
            os.sched_yield()  # the core may be wanted by the very process that has the answer
