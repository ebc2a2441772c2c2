"""The optimum over all policies: never below a policy that exists, and reached where that can be proved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import all_feasible, ensemble, r2r
from tokenflow.errors import PlanError
from tokenflow.planner import Lookahead, RoutingModel, optimum, policy_throughput, throughput


def test_one_request_can_only_be_eager() -> None:
    assert optimum(r2r(), 1).tokens_per_s == pytest.approx(1e3 / (6.0 + 0.35 * 27.9))


def test_two_requests_are_best_kept_together() -> None:
    # Against (1, 2) nothing gains: both always run in one batch, or wait for each other at the large model.
    assert optimum(r2r(), 2).tokens_per_s == pytest.approx(throughput(r2r(), (1, 2), 2).tokens_per_s)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.02, 0.9), st.integers(10, 80), st.integers(2, 5))
def test_no_policy_beats_the_optimum(p: float, ticks: int, concurrency: int) -> None:
    model = r2r(p, 1.0, ticks / 10)
    most = optimum(model, concurrency).tokens_per_s * (1 + 1e-7)
    for thresholds in all_feasible(2, concurrency):
        assert throughput(model, thresholds, concurrency).tokens_per_s <= most
        policy = Lookahead.of(model, concurrency, thresholds)
        assert policy_throughput(model, policy, concurrency).tokens_per_s <= most


def test_three_models_have_an_optimum_too() -> None:
    model = ensemble(6.0, 12.0, 24.0)
    best = max(throughput(model, thresholds, 4).tokens_per_s for thresholds in all_feasible(3, 4))
    assert best < optimum(model, 4).tokens_per_s < 1.05 * best


def test_too_many_states_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(PlanError, match="more than 100 states; use fewer requests"):
        optimum(r2r(), 8, state_limit=100)


def test_routing_without_a_single_long_run_throughput_is_an_error() -> None:
    fork = RoutingModel([[0, 0.5, 0.5], [0, 1, 0], [0, 0, 1]], [[1] * 3] * 3, [1.0, 5.0, 20.0])
    with pytest.raises(PlanError, match="no single long-run throughput"):
        optimum(fork, 2)


def test_a_model_that_is_not_markov_has_no_known_optimum() -> None:
    with pytest.raises(PlanError, match="needs constant latencies and geometric runs"):
        optimum(r2r(jitter=0.05), 2)
