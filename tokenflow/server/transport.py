"""Bodies, answers and streams of events over ASGI, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenflow.server.errors import ApiError, too_large, too_slow

T = TypeVar("T")

LARGEST_BODY = 8 * 2**20
BODY_S = 120.0
"""What a client gets to send a body."""
DONE = b"data: [DONE]\n\n"
WIRE = "tokenflow.wire"
"""Under this name the scope of a request has the :class:`Wire` of its response."""


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


class Json(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


def failed(error: ApiError) -> Json:
    """An error as an answer."""
    return Json(error.envelope(), status_code=error.status, headers=dict(error.headers))


async def read_body(request: Request, limit: int = LARGEST_BODY) -> bytes:
    """The body of a request.

    :raises ApiError: if it is larger than ``limit`` bytes, or does not come.
    :raises ClientGone: if the client leaves before all of it is there.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                more = message.get("more_body", False)
    except TimeoutError:
        raise too_slow(BODY_S) from None
    return b"".join(parts)


async def unless_gone(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Do the work for a client; it is cancelled as soon as the client leaves.

    :raises ClientGone: if it did.
    """
    done: list[T] = []

    async def do() -> None:
        done.append(await work())
        tasks.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            # In a task of its own, which has not as many frames to pass for every token.
            tasks.start_soon(do)
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise sole(group) from None
    if not done:
        raise ClientGone
    return done[0]


def sole(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, and of groups in it: the others are of the same cause."""
    first = group.exceptions[0]
    return sole(first) if isinstance(first, BaseExceptionGroup) else first


class Wire(Protocol):
    """How the parts of a response's body are written: at once, without a task that waits for each."""

    def ready(self) -> bool:
        """Whether the client keeps up."""

    def write(self, data: bytes) -> None:
        """Write a part."""

    async def drained(self) -> None:
        """Wait until the client has caught up."""


class Events:
    """The sending end of a stream of server-sent events, which may come from several responses."""

    def __init__(self, send: Send, wire: Wire, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = headers
        self.write, self.ready, self.drained = wire.write, wire.ready, wire.drained
        self._beginning = asyncio.Lock()
        self.begun = False

    async def begin(self) -> None:
        """Begin the response, if it has not begun; once this returns, events may be written."""
        async with self._beginning:
            if self.begun:
                return
            self.begun = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()],
                }
            )

    async def end(self, events: bytes = b"") -> None:
        """Send the last events and close the stream."""
        await self.begin()
        await self._send({"type": "http.response.body", "body": events + DONE, "more_body": False})


class EventStream(Response):
    """A response that ``feed`` writes as it goes; it is cancelled as soon as the client leaves.

    :param error: what a client is told of an exception of ``feed``: as an error response if nothing was sent
        yet, else as the last event.
    :param gone: called if the client left.
    """

    def __init__(
        self,
        feed: Callable[[Events], Awaitable[None]],
        error: Callable[[Exception], ApiError],
        gone: Callable[[], None],
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._feed = feed
        self._error = error
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = Events(send, scope["extensions"][WIRE], self.headers)
        try:
            await unless_gone(receive, lambda: self._feed(events))
        except ClientGone:
            self._gone()
        except Exception as error:
            told = self._error(error)
            if not events.begun:
                await failed(told)(scope, receive, send)
            else:
                await events.end(event(told.envelope()))


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"
