"""Runs on simulated models, and what the throughput model says of the very same routes.

A run keeps a constant number of requests going: request r has seed r, so its route is the same whatever
the batches.  The rate is counted from the first step to the moment where the first request is done; the
prediction replays the routes of the same requests in the event simulation of ``tokenflow.planner``, over the
same span.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from tokenflow.planner import RoutingModel, StartPolicy
from tokenflow.planner.routes import Visit
from tokenflow.planner.simulate import replay
from tokenflow.random import uniform
from tokenflow.router import Router
from tokenflow.wire.messages import Step, StepDone

SMALL_MS, LARGE_MS, P = 6.0, 27.9, 0.35
"""TokenRouter's figures for R2R (arXiv 2610.12242)."""
PROMPT = [1, 2, 3]
BLOCKS = 32


def recipe(
    latency_ms: Sequence[float] = (SMALL_MS, LARGE_MS),
    p: float = P,
    batching: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Two models as in R2R: the small one hands over with probability p, the large one hands back."""
    small, large = latency_ms
    return {
        "name": "sim",
        "entry": "slm",
        "params": {"p": p},
        "models": {
            "slm": {"engine": "sim", "latency_ms": small, "routing": {"llm": "p"}},
            "llm": {"engine": "sim", "latency_ms": large, "routing": {"slm": 1}},
        },
        "routes": {
            "slm": [{"when": "draw < p", "to": "llm", "send": "drop_last"}],
            "llm": [{"after": 1, "to": "slm", "send": "keep"}],
        },
        "batching": dict(batching or {"policy": "eager"}),
    }


def routing_model(latency_ms: Sequence[float] = (SMALL_MS, LARGE_MS), p: float = P) -> RoutingModel:
    """The routing model of :func:`recipe`."""
    return RoutingModel([[1 - p, p], [1, 0]], [[1, 0], [1, 0]], list(latency_ms))


def route(seed: int, tokens: int, p: float = P) -> list[Visit]:
    """The steps by which the request with ``seed`` gets so many tokens."""
    visits = []
    for position in range(tokens):
        if uniform(seed, 0, position, 1, "route") < p:
            visits += [Visit(0, 0.0), Visit(1, 1.0)]
        else:
            visits.append(Visit(0, 1.0))
    return visits


@dataclass
class Log:
    """What a router's observer sees: when each step was over, and how many tokens it committed."""

    steps: list[tuple[float, str, StepDone]] = field(default_factory=list)

    def __call__(self, model: str, step: Step, done: StepDone) -> None:
        if done.rows:
            self.steps.append((done.ended, model, done))

    @property
    def started(self) -> float:
        """When the first step began."""
        return min(done.started for _, _, done in self.steps[:2])

    @property
    def ended(self) -> float:
        """When the last step's reply was read."""
        return self.steps[-1][0]

    def rate(self, begin: float = -math.inf, end: float = math.inf) -> float:
        """Tokens per second between two moments."""
        begin, end = max(begin, self.started), min(end, self.ended)
        tokens = sum(
            sum(row.rule < 0 or model == "llm" for row in done.rows)
            for at, model, done in self.steps
            if begin < at <= end
        )
        return tokens / (end - begin)

    def half_width(self) -> float:
        """Half-width of the 95 % confidence interval of the whole rate, from the means of 32 parts."""
        edges = [self.started + (self.ended - self.started) * i / BLOCKS for i in range(BLOCKS + 1)]
        rates = [self.rate(*pair) for pair in itertools.pairwise(edges)]
        return 2.04 * statistics.stdev(rates) / math.sqrt(BLOCKS)


def run(
    given: Mapping[str, Any],
    concurrency: int,
    tokens: int,
    *,
    drive: Callable[[Router, Log], Any] | None = None,
) -> Log:
    """Run ``concurrency`` requests of so many tokens each until the first is done."""
    log = Log()

    async def requests() -> None:
        async with Router(given, observer=log) as router, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(router.generate(PROMPT, seed=seed, max_tokens=tokens))
                for seed in range(concurrency)
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(requests())
    return log


def predict(model: RoutingModel, policy: StartPolicy, concurrency: int, tokens: int, p: float = P) -> float:
    """Tokens per second of the same requests in the event simulation."""
    routes = [route(seed, tokens, p) for seed in range(concurrency)]
    return replay(model, policy, routes, concurrency).tokens_per_s
