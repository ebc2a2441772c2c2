"""The process of one server: ``python -m bench.compare.serve SERVER``, commands on standard input, in JSON.

========================================  =======================================================
``{"do": "open", "paths": [...], ...}``   load these models, in recipe order, as ``dtype``
``{"do": "run", "requests": [...], ...}`` answer these requests, ``concurrency`` at a time
``{"do": "close"}``                       unload them
========================================  =======================================================

Each is answered by one line, an object with ``error`` if it failed.  The process ends with its input.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import uvloop

from bench.compare import load, traces, work

SERVERS = {
    "tokenflow": "bench.compare.on_tokenflow:Tokenflow",
    "tokenflow-sglang": "bench.compare.on_tokenflow:TokenflowOnSglang",
    "transformers": "bench.compare.on_transformers:Official",
    "vllm": "bench.compare.on_vllm:InProcess",
    "vllm-http": "bench.compare.on_vllm_http:OverHttp",
    "ablated": "bench.ablation:Ablated",
}
"""Where each server is; its module is imported in its own environment only."""


class Server(Protocol):
    """What answers requests.

    ``at_a_time`` is how many requests it works on at once, 0 for all that are in flight.
    """

    at_a_time: int

    async def open(self, paths: Sequence[Path], dtype: str) -> None:
        """Load models, in recipe order."""

    async def generate(
        self, index: int, prompt: list[int], trace: str, variant: str, emit: load.Emit
    ) -> None:
        """Write the response to request ``index`` as its trace says, greedily, and report each kept token.

        ``variant`` is for servers that can do it in more than one way.
        """

    def drain(self) -> dict[str, Any]:
        """What the server has noted since it was last asked; goes into the results."""

    async def close(self) -> None:
        """Unload the models."""


def cpu_s(pid: int) -> float:
    """Processor time of a process and all its descendants so far, in seconds."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        process = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(process)
        # User and system time, with those of children that have ended and were waited for.
        ticks[process] = sum(map(int, fields[11:15]))
    todo, total = [pid], 0
    while todo:
        process = todo.pop()
        total += ticks.get(process, 0)
        todo += children.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


async def run(server: Server, requests: Sequence[work.Request], command: dict[str, Any]) -> dict[str, Any]:
    """Answer the requests of a command, as often as it has twists, and say what was measured."""
    salt, concurrency, twists = command["salt"], command["concurrency"], command.get("twists", [0])
    chosen = {index: requests[index] for index in command["requests"]}
    prompts = {
        index: [work.prompt(index, item.prompt_tokens, salt, twist) for twist in reversed(twists)]
        for index, item in chosen.items()
    }

    async def generate(index: int, emit: load.Emit) -> None:
        await server.generate(index, prompts[index].pop(), chosen[index].trace, command["variant"], emit)

    server.drain()
    before = cpu_s(os.getpid())
    elapsed, records = await load.closed_loop(
        generate,
        [(index, len(set(traces.writers(item.trace)))) for index, item in chosen.items()] * len(twists),
        concurrency,
        command["limit_s"],
    )
    spent = cpu_s(os.getpid()) - before
    for record in records:
        expected = traces.writers(chosen[record.request].trace)
        if record.models != expected[: len(record.models)]:
            raise RuntimeError(f"request {record.request} did not follow its trace")
    return {
        "elapsed_s": elapsed,
        "cpu_s": spent,
        "at_a_time": server.at_a_time or concurrency,
        "records": [record.as_data() for record in records],
        "notes": server.drain(),
    }


async def serve(name: str) -> None:
    """Answer commands until the input ends."""
    module, _, attribute = SERVERS[name].partition(":")
    answers = os.fdopen(os.dup(1), "w")
    # What a system prints must not end up between the answers.
    os.dup2(2, 1)
    server: Server = getattr(importlib.import_module(module), attribute)()
    requests = work.load(Path(os.environ["TOKENFLOW_BENCH_WORK"]))
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            answer = await obey(server, requests, json.loads(line))
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        await server.close()


async def obey(server: Server, requests: Sequence[work.Request], command: dict[str, Any]) -> dict[str, Any]:
    """Do what one command says; the answer, with ``error`` if it failed."""
    try:
        match command["do"]:
            case "open":
                await server.open([Path(path) for path in command["paths"]], command["dtype"])
            case "run":
                return await run(server, requests, command)
            case "close":
                await server.close()
    except Exception:
        return {"error": traceback.format_exc()}
    return {}


def main() -> None:
    """Serve on uvloop, which is what each system's own server runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
