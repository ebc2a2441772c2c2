"""HTTP as uvicorn speaks it, with bounds on what a client may send, and errors in our envelope."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from tokenflow.server.errors import ApiError, no_http
from tokenflow.server.files import Connections
from tokenflow.server.transport import LARGEST_BODY, WIRE

LARGEST_HEAD = 64 * 2**10
LARGEST_MESSAGE = 4 * LARGEST_BODY
"""Bytes of one request from which on its connection is cut, whatever was answered by then."""
HEAD_S = 60.0
"""What a client gets to send the head of a request, its first one from when it connects."""
_FIELD_BYTES = len(b": \r\n")
_LINGER_S = 5.0
"""What a client that is still sending gets to read its answer, which it would lose if we hung up at once."""


def _long_head() -> ApiError:
    return no_http(431, f"the head of a request may have {LARGEST_HEAD} bytes")


class Wire:
    """The body of a response on its way: what ASGI's ``send`` does for a part of it, but at once."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        """Whether the client keeps up."""
        return not self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Write a part, in chunked encoding; the response must have begun so."""
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def drained(self) -> None:
        """Wait until the client has caught up."""
        await self._cycle.flow.drain()


class Hand:
    """What a response is written with: its head goes with the first part of its body, in one packet.

    :param close: closes the connection.
    """

    __slots__ = ("_cycle", "_transport", "close", "is_closing", "write")

    def __init__(
        self, transport: asyncio.Transport, cycle: RequestResponseCycle, close: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._cycle = cycle
        self.close = close
        self.is_closing = transport.is_closing
        bodiless = cycle.scope["method"] == "HEAD"
        self.write: Callable[[bytes], None] = transport.write if bodiless else self._write_head

    def _write_head(self, data: bytes) -> None:
        if self._cycle.response_started:
            self.write = partial(self._write_first, data)
        else:  # the client is told to go on with its request
            self._transport.write(data)

    def _write_first(self, head: bytes, data: bytes) -> None:
        self.write = self._transport.write
        self.write(head + data)


class Protocol(HttpToolsProtocol):
    """One connection.

    Uvicorn lets a head grow without end and waits for it for ever, loses the body of a request that offers
    another protocol (as Java's client does with every request), forgets the request that runs when another
    one comes behind it on the same connection, and hangs up on who is still sending what was refused.
    """

    def __init__(self, may: Connections, refused: Callable[[str], None], *args: Any, **kwargs: Any) -> None:
        """``refused`` is told the code of each error that a client gets from here."""
        super().__init__(*args, **kwargs)
        self._may = may
        self._told = refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._received = 0
        self._in_body = False
        self._refused = False
        self._too_long = False
        self._declined = b""
        """The head of a request that offers another protocol, without the offer, until it is read again."""
        self._late: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, self._refuse_late)
        self._running: RequestResponseCycle | None = None
        if not self._may.fit(len(self.connections)):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self.pipeline.clear()
        self._abandon()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._received += len(data)
        self._parse(data)
        if self._refused:
            return
        if not self._in_body and self._received > LARGEST_HEAD:
            self._refuse(_long_head())
        elif self._received > LARGEST_MESSAGE:
            self._refuse(no_http(413, f"a request may have {LARGEST_BODY} bytes"))

    def _parse(self, data: bytes) -> None:
        """Read requests; one that offers another protocol is read again without the offer."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as stopped:
                    rest = rest[stopped.args[0] :]
                if self._declined:
                    head, self._declined = self._declined, b""
                    self.parser.feed_data(head)
        except httptools.HttpParserError:
            self._refuse(_long_head() if self._too_long else no_http(400, "this is no HTTP request"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._refuse_late)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + _FIELD_BYTES for name, value in self.headers)
        self._too_long = size > LARGEST_HEAD
        if self._too_long:
            raise ValueError("the head is too long")
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._declined = self._without_offer()
            return
        self._in_time()
        self._in_body = True
        super().on_headers_complete()
        self.cycle.transport = Hand(self.transport, self.cycle, self._hang_up)  # type: ignore[assignment]
        self.scope["extensions"] = {WIRE: Wire(self.cycle)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        if not self._declined:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._declined:
            return
        self._received = 0
        self._in_body = False
        super().on_message_complete()

    def _without_offer(self) -> bytes:
        """The head of a request, but for its offer of another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += (b"%b: %b" % field for field in self.headers if field[0] != b"upgrade")
        return b"\r\n".join((*lines, b"", b""))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _abandon(self) -> None:
        """Nobody will have the answer to the request that runs."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _refuse_late(self) -> None:
        if self.scope is None:  # nobody has asked anything
            self.transport.close()
            return
        self._refuse(no_http(408, f"the head of a request did not come within {HEAD_S:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Say so, unless an answer has begun or was given, and hang up."""
        self._in_time()
        self._refused = True
        running = self._running
        idle = running is None or (running.response_complete and not self._in_body)
        if idle or (running is not None and not running.response_started):
            body = error.envelope()
            fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            self._told(error.code)
            self.transport.write(STATUS_LINE[error.status] + fields.encode() + b"\r\n\r\n" + body)
        self._abandon()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close, but not before the client has stopped sending."""
        if not self._in_body and not self._refused:
            self.transport.close()
        elif not self.transport.is_closing():
            self._refused = True
            self.pipeline.clear()
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)
