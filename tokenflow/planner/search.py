"""The thresholds, and the start policy, that give the highest throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tokenflow.planner.candidates import candidate_sets, neighbours
from tokenflow.planner.chain import Clock, thresholds_starter
from tokenflow.planner.dtmc import can_enumerate, chains, tokens_per_tick
from tokenflow.planner.evaluate import PRECISION, STATE_LIMIT, policy_throughput, throughput
from tokenflow.planner.lookahead import Lookahead
from tokenflow.planner.model import Method, RoutingModel, Throughput, check_concurrency
from tokenflow.planner.policy import StartPolicy, Thresholds
from tokenflow.planner.sampling import Sampler

TIE = 1e-3
"""Throughputs that differ by less than this share count as equal."""

Progress = Callable[[int, int], None]
"""Called with the number of candidates that are decided and the number of all."""

_SMALL_CHAIN, _SMALL_CHAINS = 3000, 500_000  # states of one candidate, of all
_FINALISTS = 12
_COPIES = 4096
_FEWEST_COPIES = 8
_FIRST_STEPS = 200
_WORK = 40_000_000  # transitions of all copies
_DOUBT = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The best static thresholds at one concurrency.

    :param ties: other thresholds within 0.1 % of the best, best first.
    :param eager: throughput when every model starts as soon as a request waits.
    :param table: everything evaluated, best first by the lower end of the confidence interval.  What is far
        from the best is only estimated roughly, where its chain is not a small one.
    """

    concurrency: int
    thresholds: tuple[int, ...]
    throughput: Throughput
    ties: tuple[tuple[int, ...], ...]
    eager: Throughput
    table: tuple[tuple[tuple[int, ...], Throughput], ...]

    @property
    def tokens_per_s(self) -> float:
        """Predicted output tokens/s."""
        return self.throughput.tokens_per_s

    @property
    def method(self) -> Method:
        """``exact`` or ``simulated``: how :attr:`tokens_per_s` was found."""
        return self.throughput.method

    @property
    def gain(self) -> float:
        """Relative gain over eager starts: 0.07 is 7 % faster."""
        eager = self.eager.tokens_per_s
        return self.tokens_per_s / eager - 1 if eager else 0.0


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """The best start policy at one concurrency.

    :param policy: the winner: :class:`Thresholds`, or :class:`Lookahead` where that is faster.
    :param throughput: of the winner.
    :param static: the best static thresholds.
    :param lookahead: the best lookahead policy, whether it won or not.
    :param lookahead_throughput: of that.
    """

    policy: StartPolicy
    throughput: Throughput
    static: Plan
    lookahead: Lookahead
    lookahead_throughput: Throughput


def best_thresholds(
    model: RoutingModel,
    concurrency: int,
    *,
    state_limit: int = STATE_LIMIT,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The thresholds with the highest throughput among all feasible ones, sum(B_i - 1) < N.

    Candidates whose chains are small are solved exactly.  The others are sampled together and dropped as soon
    as they are clearly slower than the best; what remains is solved exactly where ``state_limit`` allows, and
    sampled to 0.05 % where not.  With several thousand candidates, a coarse grid of thresholds is searched
    first and its surroundings next.

    :raises PlanError: for a concurrency that does not fit, or a latency that is none.
    """
    concurrency = check_concurrency(concurrency)
    clock = Clock.of(model, concurrency)
    found: dict[tuple[int, ...], Throughput] = {}
    for candidates in candidate_sets(model, concurrency, found):
        _evaluate(clock, candidates, found, state_limit, seed, progress or (lambda done, total: None))
    eager = found[(1,) * model.size]
    if eager.half_width > PRECISION * eager.tokens_per_s:
        eager = throughput(model, (1,) * model.size, concurrency, state_limit=state_limit, seed=seed)
        found[(1,) * model.size] = eager
    table = tuple(sorted(found.items(), key=lambda entry: -entry[1].at_least))
    (best, rate), *others = table
    ties = tuple(b for b, other in others if other.tokens_per_s >= rate.tokens_per_s * (1 - TIE))
    return Plan(concurrency, best, rate, ties, eager, table)


def best_policy(
    model: RoutingModel,
    concurrency: int,
    *,
    state_limit: int = STATE_LIMIT,
    seed: int = 0,
    progress: Progress | None = None,
) -> PolicyPlan:
    """The faster one of the best static thresholds and the best lookahead policy.

    The lookahead policy's own thresholds are found by climbing from eager starts and from the static
    optimum, one threshold at a time.

    :raises PlanError: as :func:`best_thresholds`.
    """
    static = best_thresholds(model, concurrency, state_limit=state_limit, seed=seed, progress=progress)
    known: dict[tuple[int, ...], Throughput] = {}

    def rate(thresholds: tuple[int, ...]) -> float:
        if thresholds not in known:
            policy = Lookahead.of(model, concurrency, thresholds)
            known[thresholds] = policy_throughput(
                model, policy, concurrency, state_limit=state_limit, seed=seed
            )
        return known[thresholds].tokens_per_s

    for start in ((1,) * model.size, static.thresholds):
        _climb(rate, start, partial(neighbours, model, concurrency))
    best = max(known, key=rate)
    lookahead = Lookahead.of(model, concurrency, best)
    wins = known[best].at_least > static.tokens_per_s * (1 + PRECISION)
    return PolicyPlan(
        policy=lookahead if wins else Thresholds(static.thresholds),
        throughput=known[best] if wins else static.throughput,
        static=static,
        lookahead=lookahead,
        lookahead_throughput=known[best],
    )


def _climb(
    rate: Callable[[tuple[int, ...]], float],
    at: tuple[int, ...],
    around: Callable[[tuple[int, ...]], list[tuple[int, ...]]],
) -> None:
    """Move to the best neighbour until there is no better one."""
    while True:
        best = max(around(at), key=rate, default=at)
        if rate(best) <= rate(at):
            return
        at = best


def _evaluate(
    clock: Clock,
    candidates: list[tuple[int, ...]],
    found: dict[tuple[int, ...], Throughput],
    state_limit: int,
    seed: int,
    progress: Progress,
) -> None:
    """Add the throughput of all candidates to ``found``, roughly where it is far from the best one."""
    sampler = Sampler(clock, thresholds_starter(candidates), seed)
    sizes = [0] * len(candidates)

    def solve(numbers: Sequence[int], limit: int) -> list[int]:
        """Solve what is small enough, and return the others."""
        if not can_enumerate(clock):
            return list(numbers)
        large = []
        starter = thresholds_starter([candidates[n] for n in numbers])
        for n, chain in zip(numbers, chains(clock, starter, len(numbers), limit), strict=True):
            if isinstance(chain, int):
                sizes[n] = chain
                large.append(n)
                continue
            rate = tokens_per_tick(chain) * clock.ticks_per_s
            found[candidates[n]] = Throughput(rate, "exact", 0.0, len(chain.ticks))
            progress(len(candidates) - len(large), len(candidates))
        return large

    def race(numbers: Sequence[int], enough: int) -> list[int]:
        """Sample ever longer and drop what is clearly slower than the best; return the best that remain.

        Ends when ``enough`` or fewer remain, when all that remain are known precisely, or after a limit.
        """
        copies = sampler.begin(
            np.array(numbers, dtype=np.int64), max(_FEWEST_COPIES, _COPIES // len(numbers))
        )
        steps, work = _FIRST_STEPS, 0
        while True:
            work += steps * len(copies.candidate) * copies.replicas
            copies, estimate = sampler.run(copies, steps)
            rate, half_width = estimate.rate * clock.ticks_per_s, estimate.half_width * clock.ticks_per_s
            for n, r, h in zip(copies.candidate.tolist(), rate.tolist(), half_width.tolist(), strict=True):
                found[candidates[n]] = Throughput(r, "simulated", h, sizes[n])
            lead = max(known.tokens_per_s - _DOUBT * known.half_width for known in found.values())
            alive = rate + _DOUBT * half_width >= lead * (1 - TIE)
            left = int(alive.sum())
            copies = copies.keep(alive, _COPIES // max(1, left))
            progress(len(candidates) - left, len(candidates))
            steps *= 2
            if left <= enough or (half_width <= PRECISION * rate)[alive].all() or work >= _WORK:
                break
        return sorted(copies.candidate.tolist(), key=lambda n: found[candidates[n]].at_least)[-_FINALISTS:]

    large = solve(range(len(candidates)), min(_SMALL_CHAIN, _SMALL_CHAINS // len(candidates), state_limit))
    finalists = race(large, _FINALISTS) if large else []
    larger = solve(finalists, state_limit)
    if larger:
        race(larger, 0)
    progress(len(candidates), len(candidates))
