"""Routing models that several tests use, random ones, and an independent solver to check against."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tokenflow.planner import RoutingModel


def r2r(p: float = 0.35, small_ms: float = 6.0, large_ms: float = 27.9, **more: Any) -> RoutingModel:
    """The small model hands over with probability p; the large one writes one token and hands back."""
    return RoutingModel([[1 - p, p], [1, 0]], [[1, 0], [1, 0]], [small_ms, large_ms], **more)


def ensemble(*latency_ms: float) -> RoutingModel:
    """Three models; the next one is drawn after every token."""
    return RoutingModel([[0.5, 0.3, 0.2]] * 3, [[1, 1, 1]] * 3, latency_ms)


def all_feasible(size: int, concurrency: int) -> list[tuple[int, ...]]:
    """Every tuple of thresholds with sum(B_i - 1) < N."""
    every = itertools.product(range(1, concurrency + 1), repeat=size)
    return [b for b in every if sum(b) - size < concurrency]


def random_case(source: random.Random, quantum_ms: float = 0.5) -> tuple[RoutingModel, tuple[int, ...], int]:
    """A model of two or three with latencies that may depend on the batch, feasible thresholds, and N."""
    size = source.choice([2, 3])
    concurrency = source.randint(1, 6 if size == 2 else 4)

    def row() -> list[float]:
        weights = [source.uniform(0.02, 1) if source.random() < 0.8 else 0.0 for _ in range(size)]
        total = sum(weights)
        return [w / total for w in weights] if total else [1 / size] * size

    def latency() -> float | list[float]:
        first = source.uniform(2, 12)
        slope = source.uniform(0, 2)
        table = [first + slope * b for b in range(concurrency)]
        return source.choice([first, table])

    model = RoutingModel(
        routing=[row() for _ in range(size)],
        commits=[[source.choice([0, 1, 1, 2]) for _ in range(size)] for _ in range(size)],
        latency_ms=[latency() for _ in range(size)],
        quantum_ms=quantum_ms,
        batch_limits=[source.choice([None, concurrency]) for _ in range(size)],
        entry=source.randrange(size),
    )
    return model, source.choice(all_feasible(size, concurrency)), concurrency


@st.composite
def cases(draw: st.DrawFn, quantum_ms: float = 0.5) -> tuple[RoutingModel, tuple[int, ...], int]:
    """The same, for Hypothesis.  The longer the quantum, the fewer the states."""
    return random_case(draw(st.randoms(use_true_random=False)), quantum_ms)


def plain_throughput(model: RoutingModel, thresholds: Sequence[int], concurrency: int) -> float:
    """Tokens/s by the textbook: one state at a time, one request at a time, dense linear algebra.

    Requests are told apart only by the model they go to; the long-run average from the first state is read
    off the Cesàro limit of the transition matrix, which exists for every chain.
    """
    size = model.size
    waiting = [0] * size
    waiting[model.entry] = concurrency

    def started(state: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
        after = []
        for i, (queued, running, left) in enumerate(state):
            if not running and queued >= thresholds[i]:
                batch = min(queued, model.batch_limit(i, concurrency))
                after.append((queued - batch, batch, model.ticks(i, batch)))
            else:
                after.append((queued, running, left))
        return tuple(after)

    first = started(tuple((k, 0, 0) for k in waiting))
    number, todo = {first: 0}, [first]
    moves: list[dict[int, float]] = []
    ticks: list[int] = []
    tokens: list[float] = []
    while todo:
        state = todo.pop(0)
        step = min(left for _, running, left in state if running)
        sources = [i for i, (_, b, left) in enumerate(state) if b and left == step for _ in range(b)]
        ticks.append(step)
        tokens.append(sum(model.tokens_per_step(i) for i in sources))
        rest = tuple(
            (k, 0, 0) if b and left == step else (k, b, left - step if b else 0) for k, b, left in state
        )
        arrivals: dict[tuple[int, ...], float] = {(0,) * size: 1.0}
        for i in sources:
            spread: dict[tuple[int, ...], float] = {}
            for counts, chance in arrivals.items():
                for j, p in enumerate(model.routing[i]):
                    if p:
                        key = tuple(c + (j == at) for at, c in enumerate(counts))
                        spread[key] = spread.get(key, 0.0) + chance * p
            arrivals = spread
        out: dict[int, float] = {}
        for counts, chance in arrivals.items():
            after = started(tuple((k + n, b, left) for (k, b, left), n in zip(rest, counts, strict=True)))
            if after not in number:
                number[after] = len(number)
                todo.append(after)
            out[number[after]] = out.get(number[after], 0.0) + chance
        moves.append(out)
    matrix = np.zeros((len(number), len(number)))
    for source, out in enumerate(moves):
        for target, chance in out.items():
            matrix[source, target] = chance
    return _rate(matrix, np.array(tokens), np.array(ticks)) / model.quantum_ms * 1e3


def _rate(matrix: np.ndarray, tokens: np.ndarray, ticks: np.ndarray) -> float:
    """Expected long-run tokens per tick from state 0, class by class."""
    size = len(matrix)
    reach = np.linalg.matrix_power(np.eye(size) + (matrix > 0), size) > 0
    recurrent = [s for s in range(size) if all(reach[t, s] for t in range(size) if reach[s, t])]
    gain = np.zeros(size)
    for s in recurrent:
        members = np.flatnonzero(reach[s])
        q = matrix[np.ix_(members, members)]
        # pi (I - Q) = 0 and sum(pi) = 1, by least squares.
        system = np.vstack([(np.eye(len(members)) - q).T, np.ones(len(members))])
        pi = np.linalg.lstsq(system, np.append(np.zeros(len(members)), 1.0), rcond=None)[0]
        gain[s] = pi @ tokens[members] / (pi @ ticks[members])
    transient = [s for s in range(size) if s not in recurrent]
    if transient:
        inner = matrix[np.ix_(transient, transient)]
        outer = matrix[transient] @ gain
        gain[transient] = np.linalg.solve(np.eye(len(transient)) - inner, outer)
    assert math.isfinite(gain[0])
    return float(gain[0])
