"""The thresholds, and the start policy, that give the highest throughput."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from tokenflow.planner.candidates import candidate_sets, neighbours
from tokenflow.planner.chain import Clock
from tokenflow.planner.contest import TIE, Contest, Progress
from tokenflow.planner.evaluate import PRECISION, STATE_LIMIT, policy_throughput, throughput
from tokenflow.planner.lookahead import Lookahead
from tokenflow.planner.model import Method, RoutingModel, Throughput, check_concurrency
from tokenflow.planner.policy import StartPolicy, Thresholds

_CLIMB_STEPS, _FINAL_STEPS = 40_000, 200_000  # where a lookahead policy has to be simulated


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
    effort: float = 1.0,
    progress: Progress | None = None,
) -> Plan:
    """The thresholds with the highest throughput among all feasible ones, sum(B_i - 1) < N.

    Candidates whose chains are small are solved exactly.  The others are sampled together and dropped as soon
    as they are clearly slower than the best; what remains is solved exactly where ``state_limit`` allows, and
    sampled to 0.05 % where not.  With several thousand candidates, a coarse grid of thresholds is searched
    first and its surroundings next.  A model with jitter or run lengths is simulated request by request.

    :param effort: share of the usual sampling, where chains are too large: 0.25 is about four times as quick
        and twice as rough.
    :raises PlanError: for a concurrency that does not fit, or a latency that is none.
    """
    concurrency = check_concurrency(concurrency)
    clock = Clock.of(model, concurrency)
    contest = Contest(clock, state_limit, seed, progress or (lambda done, total: None), effort)
    for candidates in candidate_sets(model, concurrency, contest.found):
        contest.enter(candidates)
    eager = contest.found[(1,) * model.size]
    if eager.half_width > PRECISION / math.sqrt(effort) * eager.tokens_per_s:
        eager = throughput(model, (1,) * model.size, concurrency, state_limit=state_limit, seed=seed)
        contest.found[(1,) * model.size] = eager
    table = tuple(sorted(contest.found.items(), key=lambda entry: -entry[1].at_least))
    (best, rate), *others = table
    ties = tuple(b for b, other in others if other.tokens_per_s >= rate.tokens_per_s * (1 - TIE))
    return Plan(concurrency, best, rate, ties, eager, table)


def best_policy(
    model: RoutingModel,
    concurrency: int,
    *,
    state_limit: int = STATE_LIMIT,
    seed: int = 0,
    effort: float = 1.0,
    progress: Progress | None = None,
) -> PolicyPlan:
    """The faster one of the best static thresholds and the best lookahead policy.

    The lookahead policy's own thresholds are found by climbing from eager starts and from the static
    optimum, one threshold at a time.

    :param effort: as in :func:`best_thresholds`.
    :raises PlanError: as :func:`best_thresholds`.
    """
    static = best_thresholds(
        model, concurrency, state_limit=state_limit, seed=seed, effort=effort, progress=progress
    )

    def measured(lookahead: Lookahead, steps: int) -> Throughput:
        return policy_throughput(
            model, lookahead, concurrency, state_limit=state_limit, steps=round(effort * steps), seed=seed
        )

    @cache
    def rate(thresholds: tuple[int, ...]) -> float:
        return measured(Lookahead.of(model, concurrency, thresholds), _CLIMB_STEPS).tokens_per_s

    around = partial(neighbours, model, concurrency)
    tops = [_climb(rate, start, around) for start in ((1,) * model.size, static.thresholds)]
    lookahead = Lookahead.of(model, concurrency, max(tops, key=rate))
    found = measured(lookahead, _FINAL_STEPS)
    wins = found.at_least > static.tokens_per_s * (1 + PRECISION)
    return PolicyPlan(
        policy=lookahead if wins else Thresholds(static.thresholds),
        throughput=found if wins else static.throughput,
        static=static,
        lookahead=lookahead,
        lookahead_throughput=found,
    )


def _climb(
    rate: Callable[[tuple[int, ...]], float],
    at: tuple[int, ...],
    around: Callable[[tuple[int, ...]], list[tuple[int, ...]]],
) -> tuple[int, ...]:
    """Move to the best neighbour until there is no better one."""
    while True:
        best = max(around(at), key=rate, default=at)
        if rate(best) <= rate(at):
            return at
        at = best
