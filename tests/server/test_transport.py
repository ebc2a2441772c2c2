"""How streams are sent, without a server."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from tokenflow.server.transport import Events

pytestmark = pytest.mark.anyio


class Slow:
    """A client that takes the beginning of its response when it is told to, and what was sent to it."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.takes = asyncio.Event()

    async def send(self, message: Message) -> None:
        await self.takes.wait()
        self.sent.append(message["type"])

    def ready(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    async def drained(self) -> None:
        return


async def test_of_responses_that_share_a_stream_none_writes_before_it_has_begun() -> None:
    client = Slow()
    events = Events(client.send, client, {})

    async def follow(event: bytes) -> None:
        await events.begin()
        events.write(event)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(b"first"))
        tasks.create_task(follow(b"second"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.sent == []
        client.takes.set()
    assert client.sent == ["http.response.start", b"first", b"second"]
