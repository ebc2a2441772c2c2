"""Standard serving over HTTP: vLLM's OpenAI-compatible server per model, and a dispatcher as their client."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.compare import traces
from bench.compare.load import Emit

ARGUMENTS = (
    "--block-size 32 --enable-prefix-caching --max-model-len 4096 --max-num-seqs 16 --disable-log-stats "
    "--disable-uvicorn-access-log --host 127.0.0.1 --served-model-name m"
)
_START_S = 900.0
_WORD = re.compile(r"w(\d+)")
"""A token of the random models' vocabulary, as text."""


class OverHttp:
    """See :class:`bench.compare.serve.Server`; ``variant`` is as in :mod:`bench.compare.on_vllm`."""

    at_a_time = 0

    def __init__(self) -> None:
        self._servers: list[asyncio.subprocess.Process] = []
        self._urls: list[str] = []
        self._client: aiohttp.ClientSession | None = None

    async def open(self, paths: Sequence[Path], dtype: str) -> None:
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        for path in paths:
            port = _free_port()
            model = ("--model", str(path), "--dtype", dtype, "--port", str(port))
            self._servers.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", *model, *ARGUMENTS.split()
                )
            )
            self._urls.append(f"http://127.0.0.1:{port}")
        async with asyncio.timeout(_START_S):
            for url, server in zip(self._urls, self._servers, strict=True):
                await self._until_healthy(url, server)

    async def _until_healthy(self, url: str, server: asyncio.subprocess.Process) -> None:
        assert self._client is not None
        while True:
            if server.returncode is not None:
                raise RuntimeError(f"the vLLM server at {url} ended with code {server.returncode}")
            try:
                async with self._client.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(1)

    async def generate(self, index: int, prompt: list[int], trace: str, variant: str, emit: Emit) -> None:
        tokens = list(prompt)
        for call in traces.calls(trace, variant):
            left = call.kept
            async for token in self._complete(call.model, tokens, call.kept + call.drops):
                if left:
                    tokens.append(token)
                    emit(token, call.model)
                    left -= 1

    async def _complete(self, model: int, tokens: list[int], count: int) -> AsyncIterator[int]:
        """One request: the ids that the model writes after ``tokens``, as they come."""
        assert self._client is not None
        body = {
            "model": "m",
            "prompt": tokens,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": count > 1,
        }
        async with self._client.post(f"{self._urls[model]}/v1/completions", json=body) as response:
            response.raise_for_status()
            if count == 1:
                answer = await response.json()
                for word in _WORD.findall(answer["choices"][0]["text"]):
                    yield int(word)
                return
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data and data != b"[DONE]":
                    for choice in json.loads(data)["choices"]:
                        for word in _WORD.findall(choice["text"]):
                            yield int(word)

    def drain(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        for server in self._servers:
            if server.returncode is None:
                server.send_signal(signal.SIGTERM)
        for server in self._servers:
            await server.wait()
        self._servers, self._urls = [], []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
