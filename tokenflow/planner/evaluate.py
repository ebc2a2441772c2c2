"""Throughput of given thresholds or of any start policy: exact where the chain is small enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow.planner.chain import Clock, policy_starter, thresholds_starter
from tokenflow.planner.dtmc import can_enumerate, chains, tokens_per_tick
from tokenflow.planner.model import RoutingModel, Throughput, check_concurrency, check_thresholds
from tokenflow.planner.policy import StartPolicy, Thresholds
from tokenflow.planner.sampling import Sampler
from tokenflow.planner.simulate import simulate

STATE_LIMIT = 50_000
PRECISION = 5e-4
"""Aim of a simulation: the half-width of its 95 % confidence interval, relative to the throughput."""

_REPLICAS = 1024
_FIRST_ROUND, _LAST_ROUND = 500, 8000


def throughput(
    model: RoutingModel,
    thresholds: Sequence[int],
    concurrency: int,
    *,
    state_limit: int = STATE_LIMIT,
    seed: int = 0,
) -> Throughput:
    """Long-run output tokens/s of delayed batching (TokenRouter, arXiv 2610.12242, section 4).

    It begins with all requests waiting at the entry model.  Exact where at most ``state_limit`` states can be
    reached from there, simulated otherwise and where the model is not Markov; the result says which.

    :param thresholds: fewest requests of a batch, one per model.
    :param concurrency: N, requests active at a time.
    :raises PlanError: for thresholds or a concurrency that do not fit the model.
    """
    concurrency = check_concurrency(concurrency)
    if not model.is_markov:
        values = check_thresholds(model, thresholds, concurrency)
        return policy_throughput(model, Thresholds(values), concurrency, seed=seed)
    clock = Clock.of(model, concurrency)
    starter = thresholds_starter([check_thresholds(model, thresholds, concurrency)])
    states = 0
    if can_enumerate(clock):
        chain = next(chains(clock, starter, 1, state_limit))
        if not isinstance(chain, int):
            return Throughput(tokens_per_tick(chain) * clock.ticks_per_s, "exact", 0.0, len(chain.ticks))
        states = chain
    sampler = Sampler(clock, starter, seed)
    copies = sampler.begin(np.zeros(1, dtype=np.int64), _REPLICAS)
    steps = _FIRST_ROUND
    while True:
        copies, estimate = sampler.run(copies, steps)
        steps *= 2
        if steps > _LAST_ROUND or estimate.half_width[0] <= PRECISION * estimate.rate[0]:
            break
    rate, half_width = float(estimate.rate[0]), float(estimate.half_width[0])
    return Throughput(rate * clock.ticks_per_s, "simulated", half_width * clock.ticks_per_s, states)


def policy_throughput(
    model: RoutingModel,
    policy: StartPolicy,
    concurrency: int,
    *,
    state_limit: int = STATE_LIMIT,
    steps: int = 200_000,
    seed: int = 0,
) -> Throughput:
    """Long-run output tokens/s of any policy that changes its mind only when batches end.

    Exact where the model is Markov and at most ``state_limit`` states can be reached, otherwise
    simulated over ``steps`` ends of batches.

    :raises PlanError: for a concurrency that does not fit, or where the policy lets every model idle.
    """
    concurrency = check_concurrency(concurrency)
    clock = Clock.of(model, concurrency)
    states = 0
    if model.is_markov and can_enumerate(clock):
        chain = next(chains(clock, policy_starter(clock, policy), 1, state_limit))
        if not isinstance(chain, int):
            return Throughput(tokens_per_tick(chain) * clock.ticks_per_s, "exact", 0.0, len(chain.ticks))
        states = chain
    run = simulate(model, policy, concurrency, steps=steps, seed=seed)
    return Throughput(run.tokens_per_s, "simulated", run.half_width, states)
