"""``tokenflow serve`` as a process, and what it says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.server.client import Client, Exchange

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/demo.yaml"
LONG = {"prompt": "Q: 93*7=?\nA: ", "max_tokens": 900, "ignore_eos": True, "stream": True}
SHORT = {**LONG, "max_tokens": 200}


class Process:
    """A running command and what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []

    async def until(self, text: str) -> str:
        """Read stderr up to a line that holds ``text``."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.said.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} was not said: {''.join(self.said)}")

    async def end(self) -> tuple[int, str]:
        """Its exit code, and all that it said."""
        assert self.process.stderr is not None
        self.said.append((await self.process.stderr.read()).decode())
        return await self.process.wait(), "".join(self.said)


@asynccontextmanager
async def running(
    *args: str, env: Mapping[str, str] | None = None, by: Sequence[str] = ()
) -> AsyncIterator[Process]:
    """``tokenflow serve`` on any free port; killed if it is still there at the end."""
    process = await asyncio.create_subprocess_exec(
        *(*by, sys.executable, "-m", "tokenflow.cli", "serve", RECIPE, "--port", "0", *args),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    try:
        async with asyncio.timeout(60):
            yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()  # up to the end of its stderr, which is the event loop's until then


async def client_of(server: Process) -> Client:
    """A client of a server, as soon as that is ready."""
    return Client(int((await server.until("ready in")).rsplit(":", 1)[1]))


def workers_of(server: Process) -> set[psutil.Process]:
    """A server's two workers: what its nursery has forked."""
    router = psutil.Process(server.process.pid)
    workers = set(router.children(recursive=True)) - set(router.children())
    assert len(workers) == 2
    return workers


async def body_of(exchange: Exchange) -> bytes:
    return b"".join([chunk async for chunk in exchange.chunks()])
