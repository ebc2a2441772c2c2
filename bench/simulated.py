"""Runs on simulated models, and what the throughput model says of the very same routes.

A run keeps a constant number of requests going: request r has seed r, so its route is the same whatever
the batches.  It is counted from the first step to the moment where the first request is done, and the
prediction replays the same routes in the event simulation of ``tokenflow.planner`` over the same tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from tokenflow.eventloop import new_event_loop
from tokenflow.planner import RoutingModel, StartPolicy
from tokenflow.planner.model import FloatArray
from tokenflow.planner.routes import Visit
from tokenflow.planner.simulate import replay_timeline
from tokenflow.random import uniform
from tokenflow.router import Router
from tokenflow.wire.messages import Step, StepDone

SMALL_MS, LARGE_MS, P = 6.0, 27.9, 0.35
"""TokenRouter's figures for R2R (arXiv 2610.12242)."""
PROMPT = [1, 2, 3]
BLOCKS = 32
T_95 = 2.04  # Student's, for 31 degrees of freedom
SLOTS = 16
QUIET_S = 3.5
"""A router has settled that has not planned for so long: it would within 3 s, were its load another one."""


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
            "slm": {"engine": "sim", "latency_ms": small, "routing": {"llm": "p"}, "max_requests": SLOTS},
            "llm": {"engine": "sim", "latency_ms": large, "routing": {"slm": 1}, "max_requests": SLOTS},
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
    """What a router's observer sees: every step, in the order in which their replies came."""

    steps: list[tuple[str, StepDone]] = field(default_factory=list)

    def __call__(self, model: str, step: Step, done: StepDone) -> None:
        if done.rows:
            self.steps.append((model, done))

    def clear(self) -> None:
        """Forget what was."""
        self.steps.clear()

    def timeline(self) -> tuple[FloatArray, FloatArray]:
        """Seconds since the first step began, and the tokens committed until then; step by step."""
        began = min(done.started for _, done in self.steps[:2])
        ends = sorted((done.ended - began, committed(model, done)) for model, done in self.steps)
        seconds, tokens = zip(*ends, strict=True)
        return np.array([0.0, *seconds]), np.cumsum([0, *tokens])

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second between two moments of the monotonic clock."""
        tokens = sum(committed(model, done) for model, done in self.steps if begin < done.ended <= end)
        return tokens / (end - begin)


def committed(model: str, done: StepDone) -> int:
    """Tokens that a step committed."""
    return sum(row.rule < 0 or model == "llm" for row in done.rows)


@dataclass(frozen=True)
class Measured:
    """A run beside the model's replay of its routes.

    :param tokens_per_s: measured.
    :param replayed: what the event simulation says of the same routes.
    :param ratio: measured over replayed.
    :param half_width: of the 95 % confidence interval of ``ratio``, from 32 parts of the run.
    :param uncorrected: of the interval of ``tokens_per_s``, relative to it; routes are random.
    :param elsewhere: processor time that other programs took meanwhile, in cores.
    """

    tokens_per_s: float
    replayed: float
    ratio: float
    half_width: float
    uncorrected: float
    seconds: float
    elsewhere: float


def pooled(first: Measured, second: Measured) -> Measured:
    """Two runs of the same setting on different routes, as one."""
    seconds = first.seconds + second.seconds
    a, b = first.seconds / seconds, second.seconds / seconds
    tokens_per_s = a * first.tokens_per_s + b * second.tokens_per_s
    replayed_s = a * first.tokens_per_s / first.replayed + b * second.tokens_per_s / second.replayed
    return Measured(
        tokens_per_s=tokens_per_s,
        replayed=tokens_per_s / replayed_s,
        ratio=replayed_s,
        half_width=math.hypot(a * first.half_width, b * second.half_width),
        uncorrected=math.hypot(a * first.uncorrected, b * second.uncorrected),
        seconds=seconds,
        elsewhere=a * first.elsewhere + b * second.elsewhere,
    )


def compare(log: Log, predicted: tuple[FloatArray, FloatArray], elsewhere: float) -> Measured:
    """Compare a run with its replay, part by part."""
    seconds, tokens = log.timeline()
    ms, expected = predicted
    last = min(tokens[-1], expected[-1])
    edges = np.linspace(0, last, BLOCKS + 1)[1:]
    measured = np.diff([0.0, *np.interp(edges, tokens, seconds)])
    replayed = np.diff([0.0, *np.interp(edges, expected, ms / 1e3)])
    ratio = float(replayed.sum() / measured.sum())
    rates = last / BLOCKS / measured
    return Measured(
        tokens_per_s=float(last / measured.sum()),
        replayed=float(last / replayed.sum()),
        ratio=ratio,
        half_width=T_95 * float(np.std(replayed / measured, ddof=1)) / math.sqrt(BLOCKS),
        uncorrected=T_95 * float(np.std(rates, ddof=1) / rates.mean()) / math.sqrt(BLOCKS),
        seconds=float(measured.sum()),
        elsewhere=elsewhere,
    )


def run(
    given: Mapping[str, Any],
    concurrency: int,
    seconds: float,
    model: RoutingModel,
    policy: StartPolicy,
    p: float,
    looks_ahead: bool,
    first_seed: int = 0,
) -> Measured:
    """Run a recipe for about so long, once it has found its policy, and compare it with the model."""
    tokens = max(40, round(seconds * _rate(model, policy, concurrency, p) / concurrency))
    log, seeds = Log(), range(first_seed, first_seed + concurrency)

    async def requests() -> float:
        async with Router(given, observer=log) as router:
            await _settle(router, concurrency, looks_ahead)
            log.clear()
            return await _run(router, seeds, tokens)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        elsewhere = runner.run(requests())
    routes = [route(seed, tokens, p) for seed in seeds]
    return compare(log, replay_timeline(model, policy, routes, concurrency), elsewhere)


def _rate(model: RoutingModel, policy: StartPolicy, concurrency: int, p: float) -> float:
    ms, tokens = replay_timeline(model, policy, [route(s, 200, p) for s in range(concurrency)], concurrency)
    return float(tokens[-1] / ms[-1] * 1e3)


async def _settle(router: Router, concurrency: int, looks_ahead: bool) -> None:
    """Run requests until the policy that is to be measured holds, and nothing is planned any more."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(router.generate(PROMPT, seed=-seed, max_tokens=4000))
            for seed in range(1, concurrency + 1)
        ]
        await asyncio.sleep(0.3)
        quiet_s = 0.0
        while looks_ahead and quiet_s < QUIET_S:
            settled = hasattr(router.start_policy, "routing") and not planning()
            quiet_s = quiet_s + 0.1 if settled else 0.0
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
    await asyncio.sleep(0.1)


def planning() -> bool:
    """Whether this router's planner is at work."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "tokenflow.planner" in child.cmdline():
                return True
    return False


async def _run(router: Router, seeds: Iterable[int], tokens: int) -> float:
    """Run requests until the first is done; processor time of other programs, in cores."""
    before, began = busy_elsewhere(), asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(router.generate(PROMPT, seed=seed, max_tokens=tokens)) for seed in seeds]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
    return (busy_elsewhere() - before) / (asyncio.get_running_loop().time() - began)


def busy_elsewhere() -> float:
    """Seconds of processor time that everything but this process and its children has taken so far."""
    total = psutil.cpu_times()
    here = psutil.Process()
    own = sum(sum(process.cpu_times()[:2]) for process in (here, *here.children(recursive=True)))
    return float(total.user + total.nice + total.system - own)
