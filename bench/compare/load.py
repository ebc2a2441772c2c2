"""A closed loop of requests against one system, and what is measured of it.

``concurrency`` requests are in flight until all were answered or the time is up; what is not finished then
counts with what it has.  Throughput has two forms:

- *end to end*: output tokens over the whole time;
- *decode*: output tokens over the time in which every request in flight has its prompt behind it: each model
  that its trace visits has written at least once.  A system that takes one request at a time is judged by
  that one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Emit = Callable[[int, int], None]
"""Reports a kept token: its id, and the index of the model that wrote it."""

Generate = Callable[[int, Emit], Awaitable[None]]
"""Answers the request of an index."""

_WARM, _TOKEN, _ENDS = range(3)


@dataclass
class Record:
    """One request as its caller saw it; times are on the monotonic clock.

    ``visited`` is how many models its trace has; ``warm`` when the last of them had written.
    """

    request: int
    visited: int
    submitted: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    models: list[int] = field(default_factory=list)
    warm: float | None = None
    finished: float | None = None

    def emit(self, token: int, model: int) -> None:
        """A token was kept."""
        now = time.monotonic()
        self.times.append(now)
        self.tokens.append(token)
        self.models.append(model)
        if self.warm is None and len(set(self.models)) == self.visited:
            self.warm = now

    def as_data(self) -> dict[str, Any]:
        """As JSON carries it."""
        return asdict(self)


@dataclass(frozen=True)
class Figures:
    """What a run showed.  Times are seconds, throughputs output tokens per second."""

    elapsed_s: float
    tokens: int
    finished: int
    end_to_end: float
    decode: float
    decode_s: float
    ttft_s: list[float]
    latency_s: list[float]


async def closed_loop(
    generate: Generate, requests: Sequence[tuple[int, int]], concurrency: int, limit_s: float
) -> tuple[float, list[Record]]:
    """Answer requests, given as (index, models visited); gives the seconds taken, and a record of each."""
    todo = iter(requests)
    records: list[Record] = []

    async def worker() -> None:
        for index, visited in todo:
            record = Record(index, visited, time.monotonic())
            records.append(record)
            await generate(index, record.emit)
            record.finished = time.monotonic()

    began = time.monotonic()
    workers = [asyncio.ensure_future(worker()) for _ in range(concurrency)]
    done, pending = await asyncio.wait(workers, timeout=limit_s)
    elapsed = time.monotonic() - began
    for late in pending:
        late.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for worker_done in done:
        worker_done.result()
    return elapsed, records


def measure(elapsed_s: float, records: Sequence[Record], concurrency: int) -> Figures:
    """Figures of a run; ``concurrency`` is how many requests the system has in flight at a time."""
    tokens = sum(len(record.times) for record in records)
    decode_tokens, decode_s = _decoding(elapsed_s, records, concurrency)
    return Figures(
        elapsed_s=elapsed_s,
        tokens=tokens,
        finished=sum(record.finished is not None for record in records),
        end_to_end=tokens / elapsed_s,
        decode=decode_tokens / decode_s if decode_s else 0.0,
        decode_s=decode_s,
        ttft_s=[record.times[0] - record.submitted for record in records if record.times],
        latency_s=[record.finished - record.submitted for record in records if record.finished is not None],
    )


def _decoding(elapsed_s: float, records: Sequence[Record], concurrency: int) -> tuple[int, float]:
    """Tokens, and seconds, of the time in which ``concurrency`` requests are warm."""
    end = min(record.submitted for record in records) + elapsed_s
    # At one time, a request becomes warm before tokens count, and it ends after they do.
    changes: list[tuple[float, int]] = []
    for record in records:
        if record.warm is not None:
            changes += [(record.warm, _WARM), (record.finished or end, _ENDS)]
        changes += [(at, _TOKEN) for at in record.times if at != record.warm]
    warm, since, seconds, tokens = 0, 0.0, 0.0, 0
    for at, what in sorted(changes):
        if what == _TOKEN:
            tokens += warm >= concurrency
            continue
        if warm >= concurrency:
            seconds += at - since
        warm, since = warm + (1 if what == _WARM else -1), at
    return tokens, seconds
