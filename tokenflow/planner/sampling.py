"""Estimated throughput where the chain is too large to enumerate: many copies of it, run in lockstep.

The same embedded chain as in :mod:`tokenflow.planner.dtmc`, drawn instead of enumerated.  One array operation
moves every copy of every candidate to its next state, which costs about 0.2 microseconds per copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import bdtr, stdtrit

from tokenflow.planner.chain import Clock, Starter, States
from tokenflow.planner.model import BoolArray, FloatArray, IntArray

_CONFIDENCE = 0.95
_COPIES_PER_CONTROL = 8


class Copies(NamedTuple):
    """R independent copies of each of C candidates' chains.

    :param candidate: number of each candidate among those of the starter, [C].
    :param states: C * R states, the copies of a candidate side by side.
    """

    candidate: IntArray
    states: States

    @property
    def replicas(self) -> int:
        """R."""
        return int(self.states.queued.shape[1]) // max(len(self.candidate), 1)

    def keep(self, mask: BoolArray, replicas: int) -> Copies:
        """The candidates in ``mask`` [C], their copies multiplied up to about ``replicas`` each."""
        times = max(1, replicas // self.replicas)
        rows = np.arange(self.states.queued.shape[1]).reshape(len(self.candidate), -1)[mask]
        return Copies(self.candidate[mask], self.states.take(np.repeat(rows, times, axis=1).ravel()))


class Estimate(NamedTuple):
    """Tokens per tick of C candidates, with the half-widths of their 95 % confidence intervals; both [C]."""

    rate: FloatArray
    half_width: FloatArray


class Sampler:
    """Draws transitions of the chains of several candidate policies."""

    def __init__(self, clock: Clock, starter: Starter, seed: int) -> None:
        self._clock = clock
        self._start = starter
        self._random = np.random.default_rng(seed)
        self._routing = np.array(clock.model.routing).T
        self._splits = [_Split(row, clock.concurrency) for row in clock.model.routing]

    def begin(self, candidate: IntArray, replicas: int) -> Copies:
        """Copies in the first state, where all requests wait at the entry model."""
        states = self._clock.at_entry(len(candidate) * replicas)
        return Copies(
            candidate, self._clock.start(states, self._start(np.repeat(candidate, replicas), states))
        )

    def run(self, copies: Copies, steps: int) -> tuple[Copies, Estimate]:
        """Move every copy on by ``steps`` transitions, of which the first tenth is not counted.

        The rate of a candidate is the mean over its copies, so that a chain with several closed classes is
        judged by the expectation over where it ends up.
        """
        states, owner = copies.states, np.repeat(copies.candidate, copies.replicas)
        ticks, tokens = np.zeros(len(owner)), np.zeros(len(owner))
        surplus = np.zeros(states.queued.shape)
        for step in range(-(steps // 10), steps - steps // 10):
            elapsed, ended, rest = self._clock.run(states)
            arrived = np.zeros_like(ended)
            for i, split in enumerate(self._splits):
                rows = np.flatnonzero(ended[i])
                arrived[:, rows] += split.draw(ended[i, rows], self._random)
            if step >= 0:
                ticks += elapsed
                tokens += self._clock.tokens @ ended
                surplus += arrived - self._routing @ ended
            states = States(rest.queued + arrived, rest.running, rest.left)
            states = self._clock.start(states, self._start(owner, states))
        shape = (len(copies.candidate), -1)
        return Copies(copies.candidate, states), _estimate(
            (tokens / ticks).reshape(shape), (surplus / ticks).reshape(len(surplus), *shape)
        )


def _estimate(rate: FloatArray, surplus: FloatArray) -> Estimate:
    """Mean rate of each candidate over its copies.

    How many requests a copy happened to route to each model, beyond what was expected, explains most of how
    the copies differ, and has the known mean 0: a control variate, taken out by linear regression.

    :param rate: tokens per tick, [C, R].
    :param surplus: requests routed to each model beyond their expectation, per tick, [M, C, R].
    """
    candidates, replicas = rate.shape
    mean, half_width = np.empty(candidates), np.empty(candidates)
    for c in range(candidates):
        # The last model's surplus follows from the others', as those of all models add up to 0.
        controls = [control for control in surplus[:-1, c] if control.any()]
        if replicas < _COPIES_PER_CONTROL * (len(controls) + 1):
            controls = []
        design = np.column_stack([np.ones(replicas), *controls])
        freedom = replicas - design.shape[1]
        inverse = np.linalg.pinv(design.T @ design)
        fitted = inverse @ design.T @ rate[c]
        residual = rate[c] - design @ fitted
        error = math.sqrt(max(0.0, float(inverse[0, 0] * (residual @ residual) / freedom)))
        mean[c] = fitted[0]
        half_width[c] = error * stdtrit(freedom, (1 + _CONFIDENCE) / 2)
    return Estimate(mean, half_width)


class _Split:
    """Draws how many requests of a batch go to each model: one binomial after the other, by inversion."""

    def __init__(self, row: Sequence[float], largest: int) -> None:
        self._size, self._largest = len(row), largest
        self._targets = [j for j, p in enumerate(row) if p > 0]
        left, self._steps = 1.0, []
        trials, successes = np.arange(largest + 1)[:, None], np.arange(largest)[None, :]
        for j in self._targets[:-1]:
            # One ascending table for every number of trials n: its distribution function, shifted by n.
            cumulative = bdtr(np.minimum(successes, trials), trials, min(row[j] / left, 1.0))
            self._steps.append((trials + cumulative).ravel())
            left -= row[j]

    def draw(self, batch: IntArray, random: np.random.Generator) -> IntArray:
        """Requests that go to each model, [M, S], for batches of given sizes, [S]."""
        going = np.zeros((self._size, len(batch)), dtype=np.int64)
        left = batch
        for j, steps in zip(self._targets, self._steps, strict=False):
            uniform = left + random.random(len(batch))
            below = np.searchsorted(steps, uniform, side="right") - left * self._largest
            going[j] = np.minimum(below, left)  # the sum above can round up to the next n
            left = left - going[j]
        going[self._targets[-1]] = left
        return going
