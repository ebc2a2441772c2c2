"""The routing process as a Markov chain embedded at the instants where batches end.

A state says for each of M models how many requests wait (``queued``), how many are in the running batch
(``running``, 0 when idle) and how many ticks that batch still takes (``left``); TokenRouter, arXiv
2610.12242, section 4 and its appendix.  States are columns of int64 arrays of shape [M, S].  When a batch
starts is decided by a :data:`Starter`, for several candidate policies at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from tokenflow.errors import PlanError
from tokenflow.planner.model import BoolArray, FloatArray, IntArray, RoutingModel
from tokenflow.planner.policy import Snapshot, StartPolicy, Thresholds

_FOREVER = np.iinfo(np.int64).max


class States(NamedTuple):
    """S states of M models; three arrays of shape [M, S]."""

    queued: IntArray
    running: IntArray
    left: IntArray

    def take(self, which: IntArray | BoolArray) -> States:
        """Some of the states."""
        return States(self.queued[:, which], self.running[:, which], self.left[:, which])


Starter = Callable[[IntArray, States], BoolArray]
"""Which idle models start now, [M, S], given each state's candidate policy [S] and the states."""


@dataclass(frozen=True)
class Clock:
    """A routing model at one concurrency N, as tables.

    :param quanta: quanta of one tick, the greatest number that divides all latencies.
    :param latency: ticks of one step, [M, N + 1] by model and batch size.
    :param limits: most requests in one step, [M].
    :param tokens: expected output tokens of one request's step, [M].
    """

    model: RoutingModel
    concurrency: int
    quanta: int
    latency: IntArray
    limits: IntArray
    tokens: FloatArray

    @classmethod
    def of(cls, model: RoutingModel, concurrency: int) -> Clock:
        """The tables of ``model`` at ``concurrency`` active requests.

        :raises PlanError: where a latency function gives something that is not a latency.
        """
        limits = [model.batch_limit(i, concurrency) for i in range(model.size)]
        latency = np.zeros((model.size, concurrency + 1), dtype=np.int64)
        for i, limit in enumerate(limits):
            latency[i, 1 : limit + 1] = [model.ticks(i, batch) for batch in range(1, limit + 1)]
        quanta = math.gcd(*latency.ravel().tolist())
        tokens = np.array([model.tokens_per_step(i) for i in range(model.size)])
        return cls(model, concurrency, quanta, latency // quanta, np.array(limits), tokens)

    @property
    def ticks_per_s(self) -> float:
        """Ticks per second."""
        return 1e3 / (self.quanta * self.model.quantum_ms)

    def at_entry(self, count: int) -> States:
        """``count`` copies of the first state, in which nothing runs and all requests wait at the entry."""
        states = States(*(np.zeros((self.model.size, count), dtype=np.int64) for _ in range(3)))
        states.queued[self.model.entry] = self.concurrency
        return states

    def start(self, states: States, go: BoolArray) -> States:
        """Start a batch of all that waits, up to the batch limit, at the models where ``go``, [M, S]."""
        batch = np.where(go, np.minimum(states.queued, self.limits[:, None]), 0)
        ticks = self.latency[np.arange(self.model.size)[:, None], batch]
        return States(states.queued - batch, states.running + batch, states.left + ticks)

    def run(self, states: States) -> tuple[IntArray, IntArray, States]:
        """Run until the next batches end.

        :returns: ticks that took, [S]; requests whose step ended, [M, S]; the states without those.
        :raises PlanError: where nothing runs.
        """
        elapsed = np.where(states.running > 0, states.left, _FOREVER).min(axis=0)
        if (elapsed == _FOREVER).any():
            raise PlanError(
                "the policy starts nothing although no model runs: its requests would wait for ever"
            )
        ended = np.where(states.left == elapsed, states.running, 0)
        left = np.maximum(states.left - elapsed, 0)
        return elapsed, ended, States(states.queued, states.running - ended, left)


def thresholds_starter(candidates: Sequence[Sequence[int]]) -> Starter:
    """Delayed batching with one row of thresholds per candidate."""
    table: IntArray = np.array(candidates, dtype=np.int64).T

    def start(candidate: IntArray, states: States) -> BoolArray:
        reached: BoolArray = (states.running == 0) & (states.queued >= table[:, candidate])
        return reached

    return start


def policy_starter(clock: Clock, policy: StartPolicy) -> Starter:
    """Any policy, as the only candidate; it is asked state by state."""
    if isinstance(policy, Thresholds):
        return thresholds_starter([policy.thresholds])

    quantum_ms = clock.model.quantum_ms

    @cache
    def started(
        queued: tuple[int, ...], running: tuple[int, ...], quanta: tuple[int, ...]
    ) -> tuple[int, ...]:
        return policy.decide(Snapshot(queued, running, [left * quantum_ms for left in quanta])).start

    def start(_: IntArray, states: States) -> BoolArray:
        go = np.zeros(states.queued.shape, dtype=bool)
        arrays = (states.queued, states.running, states.left * clock.quanta)
        for column, state in enumerate(zip(*(map(tuple, array.T.tolist()) for array in arrays), strict=True)):
            go[list(started(*state)), column] = True
        return go

    return start
