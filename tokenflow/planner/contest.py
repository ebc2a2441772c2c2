"""Many candidate thresholds against each other: precise near the best, rough where one is far behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tokenflow.planner.chain import Clock, thresholds_starter
from tokenflow.planner.dtmc import can_enumerate, chains, tokens_per_tick
from tokenflow.planner.evaluate import PRECISION
from tokenflow.planner.model import Throughput
from tokenflow.planner.policy import Thresholds
from tokenflow.planner.sampling import Sampler
from tokenflow.planner.simulate import simulate

TIE = 1e-3
"""Throughputs that differ by less than this share count as equal."""

Found = dict[tuple[int, ...], Throughput]
"""Throughput by thresholds."""

Progress = Callable[[int, int], None]
"""Called with the number of candidates that are decided and the number of all."""

_SMALL_CHAIN, _SMALL_CHAINS = 3000, 500_000  # states of one candidate, of all of them
_FINALISTS = 12
_DOUBT = 2.0  # half-widths
_COPIES, _FEWEST_COPIES = 4096, 8
_FIRST_STEPS, _MOST_WORK = 200, 40_000_000  # transitions of one copy, of all of them
_FIRST_EVENTS, _MOST_EVENTS = 2000, 128_000


class Contest:
    """Evaluates candidates at one concurrency and keeps what it found.

    :param effort: share of the sampling that is done where chains are too large.
    """

    def __init__(
        self, clock: Clock, state_limit: int, seed: int, progress: Progress, effort: float = 1.0
    ) -> None:
        self.found: Found = {}
        self._clock = clock
        self._state_limit = state_limit
        self._seed = seed
        self._progress = progress
        self._most_work, self._most_events = effort * _MOST_WORK, effort * _MOST_EVENTS
        self._precision = PRECISION / math.sqrt(effort)
        self._states: dict[tuple[int, ...], int] = {}

    def enter(self, candidates: Sequence[tuple[int, ...]]) -> None:
        """Find the throughput of all candidates, roughly where one is clearly slower than the best."""
        if self._clock.model.is_markov:
            small = min(_SMALL_CHAIN, _SMALL_CHAINS // len(candidates), self._state_limit)
            large = self._solve(candidates, small)
            finalists = self._solve(self._sample(large, enough=_FINALISTS), self._state_limit)
            self._sample(finalists, enough=0)
        else:
            self._simulate(candidates)
        self._progress(len(self.found), len(self.found))

    def _solve(self, candidates: Sequence[tuple[int, ...]], state_limit: int) -> list[tuple[int, ...]]:
        """Solve the chains that are small enough; return the candidates whose chains are not."""
        if not candidates or not can_enumerate(self._clock):
            return list(candidates)
        large = []
        solved = chains(self._clock, thresholds_starter(candidates), len(candidates), state_limit)
        for thresholds, chain in zip(candidates, solved, strict=True):
            if isinstance(chain, int):
                self._states[thresholds] = chain
                large.append(thresholds)
                continue
            rate = tokens_per_tick(chain) * self._clock.ticks_per_s
            self.found[thresholds] = Throughput(rate, "exact", 0.0, len(chain.ticks))
        self._progress(len(self.found), len(self.found) + len(large))
        return large

    def _sample(self, candidates: Sequence[tuple[int, ...]], enough: int) -> list[tuple[int, ...]]:
        """Sample ever longer and drop what is clearly slower; return the best that remain, at most a dozen.

        Ends when ``enough`` or fewer remain, when those are known precisely, or when it has taken too long.
        """
        if not candidates:
            return []
        sampler = Sampler(self._clock, thresholds_starter(candidates), self._seed)
        copies = sampler.begin(np.arange(len(candidates)), max(_FEWEST_COPIES, _COPIES // len(candidates)))
        steps, work = _FIRST_STEPS, 0
        while True:
            work += steps * len(copies.candidate) * copies.replicas
            copies, estimate = sampler.run(copies, steps)
            racing = [candidates[n] for n in copies.candidate]
            per_s = self._clock.ticks_per_s
            for thresholds, rate, half in zip(racing, estimate.rate, estimate.half_width, strict=True):
                states = self._states.get(thresholds, 0)
                self.found[thresholds] = Throughput(
                    float(rate) * per_s, "simulated", float(half) * per_s, states
                )
            ahead = np.array([self._may_win(thresholds) for thresholds in racing])
            left = int(ahead.sum())
            self._progress(len(self.found) - left, len(self.found))
            precise = (estimate.half_width <= self._precision * estimate.rate)[ahead].all()
            if left <= enough or precise or work >= self._most_work:
                break
            copies = copies.keep(ahead, _COPIES // left)
            steps *= 2
        remaining = [thresholds for thresholds, is_ahead in zip(racing, ahead, strict=True) if is_ahead]
        return sorted(remaining, key=lambda thresholds: self.found[thresholds].at_least)[-_FINALISTS:]

    def _simulate(self, candidates: Sequence[tuple[int, ...]]) -> None:
        """Simulate request by request, twice as long each time, and drop what is clearly slower."""
        racing, events, model = list(candidates), _FIRST_EVENTS, self._clock.model
        while events <= self._most_events and (len(racing) > 1 or racing[0] not in self.found):
            for thresholds in racing:
                run = simulate(
                    model, Thresholds(thresholds), self._clock.concurrency, steps=events, seed=self._seed
                )
                self.found[thresholds] = Throughput(run.tokens_per_s, "simulated", run.half_width)
            racing = [thresholds for thresholds in racing if self._may_win(thresholds)]
            self._progress(len(self.found) - len(racing), len(self.found))
            events *= 2

    def _may_win(self, thresholds: tuple[int, ...]) -> bool:
        """Whether it may still be the best, or tie with the best."""
        lead = max(rate.tokens_per_s - _DOUBT * rate.half_width for rate in self.found.values())
        rate = self.found[thresholds]
        return rate.tokens_per_s + _DOUBT * rate.half_width >= lead * (1 - TIE)
