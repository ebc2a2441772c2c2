"""An HTTP client that hides nothing: what comes and when; connections can be dropped, or read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that is one."""
        assert self.status >= 400, self.body
        assert set(self.json) == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The data of all events of a stream but the last, which must be [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.body
        *events, last, rest = self.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Exchange:
    """A connection: what is asked on it, and the answer as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> None:
        """Send a request."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"host": "test", "content-length": str(len(data)), **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + data)

    async def head(self) -> int:
        """Wait for the status and the headers."""
        line, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        self.status = int(line.split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return self.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readline()
        await self.reader.readline()

    async def reply(self) -> Reply:
        """Wait for all of the answer."""
        await self.head()
        return Reply(self.status, self.headers, b"".join([chunk async for chunk in self.chunks()]))

    def drop(self) -> None:
        """Close the connection at once."""
        self.writer.transport.abort()


class Client:
    """Asks one server."""

    def __init__(self, port: int) -> None:
        self.port = port

    @asynccontextmanager
    async def connect(self, *, narrow: bool = False) -> AsyncIterator[Exchange]:
        """A connection on which nothing was asked yet; a ``narrow`` one reads next to nothing ahead."""
        sock = socket.socket()
        if narrow:
            # It counts only before the connection is there.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 if narrow else 2**16)
        try:
            yield Exchange(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Exchange]:
        """A request on a connection of its own."""
        async with self.connect() as exchange:
            exchange.ask(method, path, body, headers)
            yield exchange

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The whole answer to a request."""
        async with asyncio.timeout(TIMEOUT_S), self.open(method, path, body, headers) as exchange:
            return await exchange.reply()

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.ask("GET", path, headers=headers)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        return await self.ask("POST", path, body, headers)

    async def complete(self, prompt: Any, **more: Any) -> Any:
        """The answer of /v1/completions, which must be one."""
        reply = await self.post("/v1/completions", {"prompt": prompt, **more})
        assert reply.status == 200, reply.body
        return reply.events if more.get("stream") else reply.json

    async def chat(self, text: str, **more: Any) -> Any:
        """The answer of /v1/chat/completions to one message, which must be one."""
        messages = [{"role": "user", "content": text}]
        reply = await self.post("/v1/chat/completions", {"messages": messages, **more})
        assert reply.status == 200, reply.body
        return reply.events if more.get("stream") else reply.json

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values that have these labels."""
        text = (await self.get("/metrics")).body.decode()
        found = [line for line in text.splitlines() if line.startswith(f"tokenflow:{name}{{")]
        wanted = [line for line in found if all(f'{key}="{value}"' in line for key, value in labels.items())]
        return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)
