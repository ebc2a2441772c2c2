"""Event-driven simulation of N requests, one by one: what the Markov chain cannot say.

Run lengths need not be geometric, latencies may jitter, any start policy can be tried, and recorded routes
can be replayed.  Where latencies are constant, time is counted in whole quanta, so that batches end together
exactly when they do in the chain of :mod:`tokenflow.planner.dtmc`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from tokenflow.errors import PlanError
from tokenflow.planner.model import FloatArray, RoutingModel, check_concurrency
from tokenflow.planner.policy import Snapshot, StartPolicy
from tokenflow.planner.routes import Route, Visit, check_route, draw_route

_WINDOWS = 32
_CONFIDENCE = 0.95
_INSTANT = 1e-6  # quanta


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulated run measured.

    :param tokens_per_s: tokens over time, of the whole measured part.
    :param half_width: of the 95 % confidence interval of ``tokens_per_s``, by batch means.
    :param tokens: output tokens committed in the measured part.
    :param elapsed_ms: its length in simulated time.
    :param mean_batch: mean batch size of each model; 0 where it never ran.
    :param busy: share of the time in which each model ran.
    """

    tokens_per_s: float
    half_width: float
    tokens: float
    elapsed_ms: float
    mean_batch: tuple[float, ...]
    busy: tuple[float, ...]


def simulate(
    model: RoutingModel,
    policy: StartPolicy,
    concurrency: int,
    *,
    steps: int = 200_000,
    seed: int = 0,
) -> Simulation:
    """Simulate a constant number of requests on random routes.

    Each request draws its route from a stream of its own, so runs with one seed and different policies see
    the same routes.  Where latencies jitter, the policy sees the expected end of a batch, not the drawn one.

    :param steps: instants at which batches end, in all; the first tenth is not measured.
    :raises PlanError: for arguments out of range, or where the policy lets every model idle.
    """
    concurrency = check_concurrency(concurrency)
    if steps < 10 * _WINDOWS:
        raise PlanError(f"steps must be at least {10 * _WINDOWS}, got {steps!r}")
    routes = [draw_route(model, random.Random(f"{seed}/route/{r}")) for r in range(concurrency)]
    log = _run(model, policy, routes, iter(()), _latencies(model, concurrency, seed), steps)
    return log.measure(model, skip=steps // 10)


def replay(
    model: RoutingModel,
    policy: StartPolicy,
    routes: Sequence[Route],
    concurrency: int,
    *,
    seed: int = 0,
) -> Simulation:
    """Simulate recorded routes: ``concurrency`` at a time, the next one when one ends.

    The measured part begins at time 0 and ends as soon as fewer than ``concurrency`` requests are left.  Only
    the latencies of ``model`` are used, unless the policy looks at its routing.

    :param routes: one per request; at least ``concurrency``.
    :raises PlanError: for routes or arguments that do not fit.
    """
    return _replayed(model, policy, routes, concurrency, seed).measure(model, skip=0)


def replay_timeline(
    model: RoutingModel,
    policy: StartPolicy,
    routes: Sequence[Route],
    concurrency: int,
    *,
    seed: int = 0,
) -> tuple[FloatArray, FloatArray]:
    """What :func:`replay` simulates, instant by instant: milliseconds, and the tokens committed until then.

    :raises PlanError: as :func:`replay`.
    """
    log = _replayed(model, policy, routes, concurrency, seed)
    return np.array(log.quanta) * model.quantum_ms, np.array(log.tokens)


def _replayed(
    model: RoutingModel, policy: StartPolicy, routes: Sequence[Route], concurrency: int, seed: int
) -> _Log:
    concurrency = check_concurrency(concurrency)
    if len(routes) < concurrency:
        raise PlanError(f"{concurrency} requests at a time need as many routes, got {len(routes)}")
    recorded = [iter(check_route(model, number, route)) for number, route in enumerate(routes)]
    latencies = _latencies(model, concurrency, seed)
    return _run(model, policy, recorded[:concurrency], iter(recorded[concurrency:]), latencies, None)


class _Log:
    """Time and committed tokens after each instant where batches ended, and the batches of each model."""

    def __init__(self, size: int) -> None:
        self.quanta: list[float] = [0.0]
        self.tokens: list[float] = [0.0]
        self.batches: list[list[tuple[int, int, float]]] = [[] for _ in range(size)]

    def measure(self, model: RoutingModel, skip: int) -> Simulation:
        """Statistics from the ``skip``-th instant on."""
        quanta, tokens = np.array(self.quanta[skip:]), np.array(self.tokens[skip:])
        elapsed_ms = float(quanta[-1] - quanta[0]) * model.quantum_ms
        committed = float(tokens[-1] - tokens[0])
        mean_batch, busy = [], []
        for batches in self.batches:
            counted = [(size, time) for instant, size, time in batches if instant > skip]
            mean_batch.append(sum(size for size, _ in counted) / len(counted) if counted else 0.0)
            busy.append(min(1.0, sum(time for _, time in counted) * model.quantum_ms / elapsed_ms))
        return Simulation(
            tokens_per_s=committed / elapsed_ms * 1e3,
            half_width=_half_width(quanta * (model.quantum_ms / 1e3), tokens),
            tokens=committed,
            elapsed_ms=elapsed_ms,
            mean_batch=tuple(mean_batch),
            busy=tuple(busy),
        )


def _half_width(seconds: FloatArray, tokens: FloatArray) -> float:
    """Half-width of the confidence interval of tokens / seconds, a ratio of two batch means."""
    edges = np.linspace(0, len(seconds) - 1, _WINDOWS + 1).astype(int)
    time, count = np.diff(seconds[edges]), np.diff(tokens[edges])
    if not time.all():
        return math.inf
    deviation = count - time * (count.sum() / time.sum())
    error = math.sqrt(float(deviation @ deviation) / (_WINDOWS - 1) / _WINDOWS) / float(time.mean())
    return error * float(stdtrit(_WINDOWS - 1, (1 + _CONFIDENCE) / 2))


def _latencies(model: RoutingModel, concurrency: int, seed: int) -> Callable[[int, int], tuple[int, float]]:
    """A function of model and batch size that gives the expected and the drawn latency in quanta."""
    limits = [model.batch_limit(i, concurrency) for i in range(model.size)]
    table = [[0, *(model.ticks(i, batch) for batch in range(1, limit + 1))] for i, limit in enumerate(limits)]
    if model.jitter == 0:
        return lambda i, batch: (table[i][batch], table[i][batch])
    variance = math.log1p(model.jitter**2)
    draw, sigma = random.Random(f"{seed}/jitter").gauss, math.sqrt(variance)
    return lambda i, batch: (table[i][batch], table[i][batch] * math.exp(draw(-variance / 2, sigma)))


def _run(
    model: RoutingModel,
    policy: StartPolicy,
    routes: Sequence[Iterator[Visit]],
    later: Iterator[Iterator[Visit]],
    latency: Callable[[int, int], tuple[int, float]],
    steps: int | None,
) -> _Log:
    """Run until ``steps`` instants have passed, or a route has ended and none is left to take its place."""
    size, quantum_ms, decide = model.size, model.quantum_ms, policy.decide
    limits = [model.batch_limit(i, len(routes)) for i in range(size)]
    following = [route.__next__ for route in routes]
    waiting: list[list[int]] = [[] for _ in range(size)]
    running: list[list[int]] = [[] for _ in range(size)]
    expected: list[float] = [0.0] * size  # the expected and the true end of each running batch
    ends: list[float] = [math.inf] * size
    commits: list[float] = [0.0] * len(routes)
    for request, step in enumerate(following):
        at, commits[request] = step()
        waiting[at].append(request)
    log = _Log(size)
    now: float = 0
    tokens = 0.0
    while steps is None or len(log.quanta) <= steps:
        start, ask_again_ms = decide(
            Snapshot(
                [len(requests) for requests in waiting],
                [len(requests) for requests in running],
                [(end - now) * quantum_ms for end in expected],
            )
        )
        for i in start:
            batch = waiting[i][: limits[i]]
            del waiting[i][: limits[i]]
            nominal, drawn = latency(i, len(batch))
            running[i], expected[i], ends[i] = batch, now + nominal, now + drawn
            log.batches[i].append((len(log.quanta), len(batch), drawn))
        if ask_again_ms <= 0:
            raise PlanError(
                f"the policy asks again after {ask_again_ms:g} ms; time must pass between questions"
            )
        next_end = min(ends)
        if next_end == math.inf:
            raise PlanError(
                "the policy starts nothing although no model runs: its requests would wait for ever"
            )
        # A moment that the policy waits for can pass without an end when latencies jitter.
        if now + ask_again_ms / quantum_ms < next_end - _INSTANT:
            now += ask_again_ms / quantum_ms
            continue
        now = next_end
        exhausted = False
        for i in range(size):
            if ends[i] != now:
                continue
            ends[i] = math.inf
            batch, running[i] = running[i], []
            for request in batch:
                tokens += commits[request]
                try:
                    at, commits[request] = following[request]()
                except StopIteration:
                    route = next(later, None)
                    if route is None:
                        exhausted = True
                        continue
                    following[request] = route.__next__
                    at, commits[request] = following[request]()
                waiting[at].append(request)
        log.quanta.append(now)
        log.tokens.append(tokens)
        if exhausted:
            break
    return log
