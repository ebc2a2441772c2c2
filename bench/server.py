"""What HTTP costs: router CPU time per streamed token, throughput, and how late its event loop is.

::

    python -m bench.server

The demo pair answers its evaluation prompts, streamed, 16 and 64 at a time: through :class:`Router` in one
process, and through ``tokenflow serve``, with a client in a process of its own that only counts.  CPU time is
that of the router's process, and that of its workers apart from it.  A machine that others share may be a
fifth slower a minute later, without any trace but that the same work takes everybody more CPU time; so both
ways are measured in turns, each after the other in every second round, and what is compared is what ran one
after the other.  The workers' CPU time per token says whether a round was fair: both ways give them the same
work.  Then prompts of 100,000 characters, as many tokens,
are sent while others stream, and the delays of the event loop are read from the server's metrics.  At last
500 clients ask at once where 64 may wait: how soon do the others know, and what do they cost?
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import psutil
import uvloop

from tokenflow.router import Router

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "server.json"
RECIPE = "recipes/demo.yaml"
PORT = 8791
URL = f"http://127.0.0.1:{PORT}"
MOST_TOKENS = 400
LOOK_S = 0.004
READ, TAIL = 2**14, 2000
"""Bytes: what comes between two looks (a large buffer would cost more than reading), and the last events of a
stream."""
LONG_PROMPT = "7" * 100_000
CROWD, WAITING = 500, 64
WARM_UP = 128
"""Prompts after which caches are warm, and it is known when batches had best start."""
ROUNDS = 6


def prompts(count: int) -> list[str]:
    rows = (ROOT / "recipes" / "demo" / "eval.jsonl").open(encoding="utf-8")
    return [json.loads(line)["prompt"] for line, _ in zip(rows, range(count), strict=False)]


@dataclass(frozen=True)
class Way:
    """A way to have prompts answered.

    :param process: where its router is.
    :param answer: streams so many at once, of so many prompts; says how many tokens and seconds that took.
    """

    process: psutil.Process
    answer: Callable[[int, int], dict[str, float]]


async def answer_lines() -> None:
    """Answer prompts in the router's own process.

    Concurrencies and counts of prompts come on stdin, tokens and seconds go to stdout.
    """
    tokens = 0

    async def work(router: Router, todo: Iterator[str]) -> None:
        nonlocal tokens
        for prompt in todo:
            async for event in router.stream(prompt, max_tokens=MOST_TOKENS):
                tokens += len(event.tokens)

    async with Router(ROOT / RECIPE) as router:
        print("ready", flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            concurrency, count = map(int, line.split())
            tokens, todo = 0, iter(prompts(count))
            started = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for _ in range(concurrency):
                    tasks.start_soon(work, router, todo)
            seconds = time.perf_counter() - started
            print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


@contextmanager
def in_process() -> Iterator[Way]:
    """The router and who asks it in one process."""
    command = [sys.executable, "-m", "bench.server", "answer"]
    pipes = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipes, stdout=pipes, text=True) as process:
        reading, writing = process.stdout, process.stdin
        assert reading is not None and writing is not None
        assert reading.readline() == "ready\n"

        def answer(concurrency: int, count: int) -> dict[str, float]:
            writing.write(f"{concurrency} {count}\n")
            writing.flush()
            result: dict[str, float] = json.loads(reading.readline())
            return result

        yield Way(psutil.Process(process.pid), answer)


class Connection:
    """A connection that asks for one stream after another."""

    def __init__(self, todo: Iterator[str]) -> None:
        self.tokens = 0
        self.open = True
        self._todo = todo
        self._tail = b""
        self._socket = socket.create_connection(("127.0.0.1", PORT))
        self._ask()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> None:
        """Take what has come, and ask again where a stream has ended."""
        data = self._socket.recv(READ)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._tail = self._tail[-TAIL:] + data
        if self._tail.endswith(b"0\r\n\r\n") and b"[DONE]" in self._tail:
            found = re.search(rb'"completion_tokens":(\d+)', self._tail)
            assert found is not None, self._tail
            self.tokens += int(found[1])
            self._tail = b""
            self._ask()

    def _ask(self) -> None:
        prompt = next(self._todo, None)
        if prompt is None:
            self._socket.close()
            self.open = False
            return
        body = {"prompt": prompt, "max_tokens": MOST_TOKENS, "stream": True}
        data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)


def client(concurrency: int, count: int) -> None:
    """Ask for all prompts and print tokens and seconds.

    It looks every few milliseconds only, at those that have something, and reads no more than it needs to
    count tokens: on a small machine, a client that woke up for every token would be measured as well.
    """
    todo = iter(prompts(count))
    started, cpu = time.perf_counter(), time.process_time()
    connections = [Connection(todo) for _ in range(concurrency)]
    waiting = {connection.fileno(): connection for connection in connections if connection.open}
    with select.epoll() as events:
        for number in waiting:
            events.register(number, select.EPOLLIN)
        while waiting:
            time.sleep(LOOK_S)
            for number, _ in events.poll(0):
                waiting[number].read()
                if not waiting[number].open:
                    del waiting[number]
    seconds = time.perf_counter() - started
    tokens = sum(connection.tokens for connection in connections)
    print(json.dumps({"tokens": tokens, "seconds": seconds, "cpu_s": time.process_time() - cpu}))


@contextmanager
def served(*args: str) -> Iterator[psutil.Process]:
    """A running server's router process."""
    command = [sys.executable, "-m", "tokenflow.cli", "serve", RECIPE, "--port", str(PORT), *args]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if "ready" in line:
                break
        yield psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)


def over_http(concurrency: int, count: int) -> dict[str, float]:
    """How many tokens and seconds a client of the server needs, and its own CPU seconds."""
    command = [sys.executable, "-m", "bench.server", "client", str(concurrency), str(count)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def cpu_s(*processes: psutil.Process) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(time.user + time.system for time in times))


def measured(way: Way, concurrency: int, count: int) -> dict[str, float]:
    """Tokens per second, and CPU microseconds per token, of streams that are answered in a way."""
    workers = way.process.children(recursive=True)
    own, theirs = cpu_s(way.process), cpu_s(*workers)
    result = way.answer(concurrency, count)
    own, theirs = cpu_s(way.process) - own, cpu_s(*workers) - theirs
    tokens = result["tokens"]
    return {
        "tokens_per_s": tokens / result["seconds"],
        "cpu_us_per_token": own / tokens * 1e6,
        "workers_cpu_us_per_token": theirs / tokens * 1e6,
        "client_cpu_us_per_token": result.get("cpu_s", 0.0) / tokens * 1e6,
    }


def compared(ways: dict[str, Way], concurrency: int, count: int) -> dict[str, Any]:
    """The medians of every way, and of the ratio of their throughputs."""
    for way in ways.values():
        way.answer(concurrency, WARM_UP)
    rounds = []
    for number in range(ROUNDS):
        order = list(ways) if number % 2 == 0 else list(reversed(ways))
        rounds.append({name: measured(ways[name], concurrency, count) for name in order})
    result: dict[str, Any] = {
        name: {figure: median(each[name][figure] for each in rounds) for figure in rounds[0][name]}
        for name in ways
    }
    ratios = [each["http"]["tokens_per_s"] / each["in_process"]["tokens_per_s"] for each in rounds]
    return {**result, "throughput_ratio": median(ratios), "throughput_ratios": ratios, "rounds": rounds}


def long_prompts(count: int) -> None:
    """Send prompts that are far too long; each is tokenized before it is refused."""
    body = json.dumps({"prompt": LONG_PROMPT}).encode()
    for _ in range(count):
        request = urllib.request.Request(f"{URL}/v1/completions", body)
        try:
            urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            assert error.code == 400, error.code
            error.close()


def delays() -> dict[str, float]:
    """How late the event loop's timers were: how many, and how many over each bound in seconds."""
    text = urllib.request.urlopen(f"{URL}/metrics", timeout=10).read().decode()
    found = re.findall(r'event_loop_delay_seconds_bucket\{le="(.+?)".*?\} (\S+)', text)
    counts = {bound: float(count) for bound, count in found}
    total = counts.pop("+Inf")
    return {"timers": total, **{f"over_{bound}_s": total - count for bound, count in counts.items()}}


async def crowd(times: int) -> dict[str, Any]:
    """All of a crowd ask at once: how many get 503, and after how many milliseconds each from its request."""
    refused: list[float] = []
    body = json.dumps({"prompt": prompts(1)[0], "max_tokens": 50, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = time.perf_counter()
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 503 " in answer.partition(b"\r\n")[0]:
            assert b"retry-after: 1" in answer.lower()
            refused.append(1e3 * (time.perf_counter() - asked))

    for _ in range(times):
        connections = [await asyncio.open_connection("127.0.0.1", PORT) for _ in range(CROWD)]
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(ask, *connection)
        for _, writer in connections:
            writer.close()
    refused.sort()
    return {"refused": len(refused), "median_ms": refused[len(refused) // 2], "max_ms": refused[-1]}


def crowded(times: int) -> dict[str, Any]:
    """The same, and the memory of the router's process before and after."""
    with served("--max-queued-reqs", str(WAITING)) as server:
        asyncio.run(crowd(1))
        before = server.memory_info().rss
        result = asyncio.run(crowd(times))
        return {**result, "grown_mib": (server.memory_info().rss - before) / 2**20}


def measure(count: int) -> dict[str, Any]:
    result: dict[str, Any] = {"cores": os.cpu_count(), "prompts": count, "concurrency": {}}
    with served() as server:
        with in_process() as own:
            ways = {"in_process": own, "http": Way(server, over_http)}
            for concurrency in (16, 64):
                result["concurrency"][concurrency] = compared(ways, concurrency, count)
        command = [sys.executable, "-m", "bench.server", "client", "16", str(count)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as others:
            long_prompts(20)
            others.wait()
        result["event_loop"] = delays()
    result["crowd"] = crowded(5)
    return result


def main() -> None:
    """Measure, print, and keep the figures."""
    match sys.argv[1:]:
        case ["client", concurrency, count]:
            client(int(concurrency), int(count))
            return
        case ["answer"]:
            uvloop.run(answer_lines())
            return
        case _:
            result = measure(int(sys.argv[1]) if sys.argv[1:] else 200)
    for concurrency, row in result["concurrency"].items():
        for way in ("in_process", "http"):
            figures = row[way]
            print(
                f"{concurrency:3} at a time, {way:10}: {figures['tokens_per_s']:6.0f} tokens/s, "
                f"{figures['cpu_us_per_token']:.1f} us of the router per token, "
                f"{figures['workers_cpu_us_per_token']:.0f} us of its workers"
            )
        ratios = row["throughput_ratios"]
        print(
            f"    throughput through HTTP: {row['throughput_ratio']:.1%} of that in process "
            f"({min(ratios):.1%} to {max(ratios):.1%} in {ROUNDS} rounds)"
        )
    print(f"delays of the event loop: {result['event_loop']}")
    print(f"{CROWD} clients where {WAITING} may wait, five times: {result['crowd']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
