"""The routing model that the planner computes with: who routes to whom, what commits, how long steps take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokenflow.errors import PlanError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

Latency = float | Sequence[float] | Mapping[int, float] | Callable[[int], float]
"""Milliseconds of one step: a number, a table, or a function of the batch size.

A sequence is the table for batch sizes 1, 2, ...; a mapping holds measured sizes.  Between two entries of
a table the latency is linear, outside it the nearest entry holds.
"""

RunLengths = Mapping[int, float] | Sequence[tuple[int, float]]

Method = Literal["exact", "simulated"]

_ROW_SUM_TOLERANCE = 1e-6
_NEVER = 1e-9
_MOST_QUANTA = 1e9
_MOST_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class Throughput:
    """Committed tokens per second in the long run, and how they were found.

    :param method: ``exact`` (stationary distribution of the chain) or ``simulated``.
    :param half_width: of the confidence interval, tokens/s; 0 where exact.
    :param states: states of the chain; where simulated, those counted before it was found too large.
    """

    tokens_per_s: float
    method: Method
    half_width: float = 0.0
    states: int = 0

    @property
    def at_least(self) -> float:
        """The lower end of the confidence interval: what a rough estimate may not pretend to exceed."""
        return self.tokens_per_s - self.half_width


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Step latency in ms as a function of the batch size, through measured points in ascending order."""

    sizes: tuple[int, ...]
    values_ms: tuple[float, ...]

    def __call__(self, batch: int) -> float:
        return float(np.interp(batch, self.sizes, self.values_ms))


@dataclass(frozen=True)
class RoutingModel:
    """M models, the routing between them, and their step latencies.

    The model of TokenRouter, arXiv 2610.12242, section 4 and its appendix on the mathematical model.

    :param routing: P, shape [M, M]: a request that ends a step at model i continues at model j with
        probability ``P[i][j]``; ``P[i][i]`` is the probability to stay.  Less than 1e-9 counts as never.
    :param commits: C, shape [M, M]: output tokens committed by a step at i that routes to j.
    :param latency_ms: M step latencies, see :data:`Latency`.
    :param quantum_ms: latencies are rounded to multiples of this; batches that end in the same quantum end
        together.
    :param batch_limits: most requests in one step of each model; ``None`` means no limit.
    :param entry: the model where requests begin.
    :param run_lengths: for each model how many consecutive steps a request makes before it leaves, as weights
        by number (a ``Counter`` of measured runs will do); their mean then replaces ``P[i][i]``.  ``None``
        where the number is geometric.
    :param jitter: relative standard deviation of each step's latency (log-normal around the given one).
    :raises PlanError: for anything that is not such a model; the message names the entry.
    """

    routing: Sequence[Sequence[float]]
    commits: Sequence[Sequence[float]]
    latency_ms: Sequence[Latency]
    quantum_ms: float = 0.1
    batch_limits: Sequence[int | None] | None = None
    entry: int = 0
    run_lengths: Sequence[RunLengths | None] | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        routing = _matrix("routing", self.routing)
        size = len(routing)
        commits = _matrix("commits", self.commits)
        if len(commits) != size:
            raise PlanError(
                f"commits must be {size} x {size} like routing, got {len(commits)} x {len(commits)}"
            )
        for i, row in enumerate(routing):
            if any(p > 1 + _ROW_SUM_TOLERANCE for p in row) or abs(sum(row) - 1) > _ROW_SUM_TOLERANCE:
                raise PlanError(
                    f"routing[{i}] must be probabilities that sum to 1, got {list(row)}: {sum(row):g}"
                )
        if isinstance(self.latency_ms, str | Mapping) or not isinstance(
            self.latency_ms, Sequence | np.ndarray
        ):
            raise PlanError(f"latency_ms must list one latency per model, got {self.latency_ms!r}")
        if len(self.latency_ms) != size:
            raise PlanError(
                f"latency_ms must list {size} latencies, one per model, got {len(self.latency_ms)}"
            )
        if not _is_number(self.quantum_ms) or self.quantum_ms <= 0:
            raise PlanError(f"quantum_ms must be a number greater than 0, got {self.quantum_ms!r}")
        limits = (None,) * size if self.batch_limits is None else _listed("batch_limits", self.batch_limits)
        if len(limits) != size:
            raise PlanError(f"batch_limits must list {size} limits, one per model, got {len(limits)}")
        for i, limit in enumerate(limits):
            if limit is not None and (not _is_count(limit) or limit < 1):
                raise PlanError(f"batch_limits[{i}] must be an integer of at least 1 or None, got {limit!r}")
        if not _is_count(self.entry) or not 0 <= self.entry < size:
            raise PlanError(f"entry must be the index of a model, 0 to {size - 1}, got {self.entry!r}")
        if not _is_number(self.jitter) or self.jitter < 0:
            raise PlanError(f"jitter must be a number of at least 0, got {self.jitter!r}")
        runs = (None,) * size if self.run_lengths is None else _listed("run_lengths", self.run_lengths)
        if len(runs) != size:
            raise PlanError(f"run_lengths must list {size} distributions, one per model, got {len(runs)}")

        def fix(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        fix("routing", tuple(_normalised(row) for row in routing))
        fix("commits", commits)
        fix("latency_ms", tuple(_step_time(f"latency_ms[{i}]", x) for i, x in enumerate(self.latency_ms)))
        fix("quantum_ms", float(self.quantum_ms))
        fix("batch_limits", tuple(None if limit is None else int(limit) for limit in limits))
        fix("entry", int(self.entry))
        fix("run_lengths", tuple(None if r is None else _runs(i, r) for i, r in enumerate(runs)))
        fix("routing", tuple(self._with_mean_run(i) for i in range(size)))
        fix("jitter", float(self.jitter))
        for i in range(size):
            self.ticks(i, 1)

    def _with_mean_run(self, model: int) -> tuple[float, ...]:
        """The routing row, with the staying probability that gives the mean of the run lengths."""
        assert self.run_lengths is not None
        row, runs = self.routing[model], self.run_lengths[model]
        if runs is None:
            return tuple(row)
        if row[model] == 1:
            raise PlanError(f"run_lengths[{model}] is given, but routing[{model}] never leaves the model")
        weights = dict(runs)
        mean = sum(length * weight for length, weight in weights.items()) / sum(weights.values())
        leave = 1 / (mean * (1 - row[model]))
        return tuple(1 - 1 / mean if j == model else p * leave for j, p in enumerate(row))

    @property
    def is_markov(self) -> bool:
        """Whether the next state depends on the present one only: geometric runs, constant latencies."""
        assert self.run_lengths is not None
        return self.jitter == 0 and not any(self.run_lengths)

    @property
    def size(self) -> int:
        """M, the number of models."""
        return len(self.routing)

    def ticks(self, model: int, batch: int) -> int:
        """Latency of one step in quanta, rounded to the nearest.

        :raises PlanError: where the latency is not a number of half a quantum to 1e9 quanta.
        """
        latency = self.latency_ms[model]
        assert callable(latency)
        value = latency(batch)
        where = f"latency_ms[{model}] at batch size {batch}"
        if not _is_number(value) or value <= 0:
            raise PlanError(f"{where} must be a number of milliseconds greater than 0, got {value!r}")
        if value / self.quantum_ms > _MOST_QUANTA:
            raise PlanError(
                f"{where} is {value:g} ms, more than {_MOST_QUANTA:g} times quantum_ms = {self.quantum_ms:g}"
            )
        ticks = math.floor(value / self.quantum_ms + 0.5)
        if ticks < 1:
            raise PlanError(
                f"{where} is {value:g} ms, less than half of quantum_ms = {self.quantum_ms:g}; lower that"
            )
        return ticks

    def step_ms(self, model: int, batch: int) -> float:
        """Latency of one step in ms as the planner uses it: a whole number of quanta."""
        return self.ticks(model, batch) * self.quantum_ms

    def batch_limit(self, model: int, concurrency: int) -> int:
        """Most requests in one step of ``model`` when ``concurrency`` requests are active."""
        assert self.batch_limits is not None
        limit = self.batch_limits[model]
        return concurrency if limit is None else min(limit, concurrency)

    def tokens_per_step(self, model: int) -> float:
        """Expected output tokens that one request commits by a step at ``model``."""
        return math.fsum(p * c for p, c in zip(self.routing[model], self.commits[model], strict=True))

    def reachable(self) -> tuple[bool, ...]:
        """Which models a request can ever visit."""
        found, todo = {self.entry}, [self.entry]
        while todo:
            for j, p in enumerate(self.routing[todo.pop()]):
                if p > 0 and j not in found:
                    found.add(j)
                    todo.append(j)
        return tuple(i in found for i in range(self.size))


def check_concurrency(concurrency: int) -> int:
    """``concurrency`` as an int.

    :raises PlanError: unless it is an integer from 1 to 1,024.
    """
    if not _is_count(concurrency) or not 1 <= concurrency <= _MOST_REQUESTS:
        raise PlanError(f"concurrency must be an integer from 1 to {_MOST_REQUESTS:,}, got {concurrency!r}")
    return int(concurrency)


def check_thresholds(model: RoutingModel, thresholds: Sequence[int], concurrency: int) -> tuple[int, ...]:
    """``thresholds`` as a tuple.

    :raises PlanError: unless there is one integer of at least 1 per model, none above its batch limit, and
        ``concurrency`` requests cannot all wait below them: sum(B_i - 1) < N.
    """
    given = _listed("thresholds", thresholds)
    if len(given) != model.size:
        raise PlanError(f"thresholds must list {model.size} integers, one per model, got {given}")
    for i, b in enumerate(given):
        if not _is_count(b) or b < 1:
            raise PlanError(f"thresholds[{i}] must be an integer of at least 1, got {b!r}")
        limit = model.batch_limit(i, max(concurrency, b))
        if b > limit:
            raise PlanError(
                f"thresholds[{i}] = {b} is above the batch limit {limit} of model {i}: it could never start"
            )
    held = sum(given) - len(given)
    if held >= concurrency:
        raise PlanError(
            f"thresholds {given} can deadlock at concurrency {concurrency}: sum(B_i - 1) = {held} requests "
            f"may all wait below them; lower the thresholds until that sum is below {concurrency}"
        )
    return tuple(int(b) for b in given)


def _listed(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise PlanError(f"{name} must list one entry per model, got {values!r}")
    return tuple(values)


def _matrix(name: str, rows: object) -> tuple[tuple[float, ...], ...]:
    try:
        table = np.asarray(rows, dtype=float)
    except (TypeError, ValueError):
        raise PlanError(f"{name} must be a square matrix of numbers, got {rows!r}") from None
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not table.size:
        raise PlanError(f"{name} must be a square matrix, got shape {table.shape}")
    for (i, j), value in np.ndenumerate(table):
        if not math.isfinite(value) or value < 0:
            raise PlanError(f"{name}[{i}][{j}] must be a finite number of at least 0, got {value:g}")
    return tuple(tuple(row) for row in table.tolist())


def _normalised(row: tuple[float, ...]) -> tuple[float, ...]:
    kept = [p if p >= _NEVER else 0.0 for p in row]
    return tuple(p / sum(kept) for p in kept)


def _runs(model: int, lengths: RunLengths) -> tuple[tuple[int, float], ...]:
    name = f"run_lengths[{model}]"
    try:
        weights = dict(lengths)
    except (TypeError, ValueError):
        raise PlanError(f"{name} must be weights by number of steps or None, got {lengths!r}") from None
    for length, weight in weights.items():
        if not _is_count(length) or length < 1:
            raise PlanError(f"{name} has length {length!r}; a run is an integer of at least 1 step")
        if not _is_number(weight) or weight < 0:
            raise PlanError(f"{name} gives length {length} the weight {weight!r}; weights are at least 0")
    if not any(weights.values()):
        raise PlanError(f"{name} has no length of positive weight")
    return tuple(sorted((int(length), float(weight)) for length, weight in weights.items() if weight > 0))


def _step_time(name: str, latency: Latency) -> Callable[[int], float]:
    if callable(latency):
        return latency
    if isinstance(latency, float) and not math.isfinite(latency):
        raise PlanError(f"{name} must be a finite number of milliseconds, got {latency!r}")
    if _is_number(latency):
        return LatencyTable((1,), (float(latency),))  # type: ignore[arg-type]
    if isinstance(latency, Mapping):
        points = dict(latency)
    elif isinstance(latency, Sequence | np.ndarray) and not isinstance(latency, str):
        points = dict(enumerate(latency, start=1))
    else:
        raise PlanError(
            f"{name} must be a number, a table by batch size or a function of it, got {latency!r}"
        )
    if not points:
        raise PlanError(f"{name} is an empty table")
    for batch, value in points.items():
        if not _is_count(batch) or batch < 1:
            raise PlanError(f"{name} has batch size {batch!r}; batch sizes are integers of at least 1")
        if not _is_number(value) or value <= 0:
            raise PlanError(f"{name} at batch size {batch} must be a number greater than 0, got {value!r}")
    sizes = sorted(points)
    return LatencyTable(tuple(int(b) for b in sizes), tuple(float(points[b]) for b in sizes))


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
