"""Throughput of given thresholds: the published figures, closed forms, an independent solver, invariants."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import all_feasible, cases, ensemble, plain_throughput, r2r, random_case
from tokenflow.planner import RoutingModel, Thresholds, policy_throughput, throughput
from tokenflow.planner.simulate import simulate

PAPER = {2: [98.96, 110.32], 3: [142.34, 158.12, 151.89], 4: [187.19, 195.44, 207.95, 190.74]}


@pytest.mark.parametrize("concurrency", PAPER)
def test_the_theory_row_of_the_paper_is_reproduced(concurrency: int) -> None:
    found = [throughput(r2r(), (1, b), concurrency) for b in range(1, concurrency + 1)]
    assert [rate.tokens_per_s for rate in found] == pytest.approx(PAPER[concurrency], abs=0.1)
    assert {rate.method for rate in found} == {"exact"}


def test_one_request_runs_at_the_single_request_speed() -> None:
    # One token per small step that stays, and per pair of a small and a large step.
    assert throughput(r2r(), (1, 1), 1).tokens_per_s == pytest.approx(1e3 / (6.0 + 0.35 * 27.9))


def test_one_model_runs_all_requests_in_every_step() -> None:
    model = RoutingModel([[1]], [[1]], [lambda batch: 5 + batch])
    assert throughput(model, (1,), 7).tokens_per_s == pytest.approx(7 / 12e-3)


def test_a_periodic_chain_is_solved() -> None:
    ping_pong = RoutingModel([[0, 1], [1, 0]], [[1, 1], [1, 1]], [6.0, 27.9])
    # The requests move as one batch between the two models.
    assert throughput(ping_pong, (1, 1), 3).tokens_per_s == pytest.approx(6 / 33.9e-3)


def test_requests_that_never_return_give_the_expectation_over_where_they_end_up() -> None:
    fork = RoutingModel([[0, 0.25, 0.75], [0, 1, 0], [0, 0, 1]], [[1] * 3] * 3, [1.0, 5.0, 20.0])
    assert throughput(fork, (1, 1, 1), 1).tokens_per_s == pytest.approx(0.25 / 5e-3 + 0.75 / 20e-3)
    # Every request settles by itself, so two of them are twice as fast in expectation.
    assert throughput(fork, (1, 1, 1), 2).tokens_per_s == pytest.approx(2 * (0.25 / 5e-3 + 0.75 / 20e-3))


@pytest.mark.parametrize("rare", [1e-3, 1e-6, 1e-9])
def test_rare_hand_offs_do_not_blur_where_requests_are(rare: float) -> None:
    # So rare that each request sees a small and a large model of its own, for 1 / rare steps of either.
    drift = RoutingModel([[1 - rare, rare], [rare, 1 - rare]], [[1, 1], [1, 1]], [6.0, 27.9])
    alone = 2e3 / (6.0 + 27.9)
    assert throughput(drift, (1, 1), 6).tokens_per_s == pytest.approx(6 * alone, rel=4 * rare + 1e-6)


def test_a_batch_limit_splits_what_waits() -> None:
    model = RoutingModel([[1]], [[1]], [10.0], batch_limits=[2])
    # Steps of two at a time, whatever waits behind them.
    assert throughput(model, (1,), 5).tokens_per_s == pytest.approx(2 / 10e-3)


def test_latencies_in_the_same_quantum_end_together() -> None:
    # 12.04 and 12.0 ms round to one value at 0.1 ms, and the small model meets the large one.
    assert throughput(r2r(large_ms=12.04), (1, 1), 4) == throughput(r2r(large_ms=12.0), (1, 1), 4)
    assert (
        throughput(r2r(large_ms=12.1), (1, 1), 4).tokens_per_s
        < throughput(r2r(large_ms=12.0), (1, 1), 4).tokens_per_s
    )


@settings(max_examples=40, deadline=None)
@given(cases(quantum_ms=2.0))
def test_the_chain_agrees_with_an_independent_solver(case: tuple[RoutingModel, tuple[int, ...], int]) -> None:
    model, thresholds, concurrency = case
    if concurrency > 3:
        concurrency = 3
        thresholds = tuple(min(b, 2) if i == 0 else 1 for i, b in enumerate(thresholds))
    rate = throughput(model, thresholds, concurrency)
    if rate.states <= 250:  # dense linear algebra
        expected = plain_throughput(model, thresholds, concurrency)
        assert rate.tokens_per_s == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_exact_and_simulated_throughput_agree_on_random_configurations() -> None:
    source = random.Random(20)
    inside, configurations = 0, 0
    while configurations < 50:
        model, thresholds, concurrency = random_case(source)
        exact = throughput(model, thresholds, concurrency, state_limit=20_000)
        # Where requests never come back, one run shows only one of several ends.
        if exact.method != "exact" or not all(model.routing[i][i] < 1 for i in range(model.size)):
            continue
        configurations += 1
        run = simulate(model, Thresholds(thresholds), concurrency, steps=10_000, seed=configurations)
        error = abs(run.tokens_per_s - exact.tokens_per_s)
        assert error <= 2 * run.half_width + 1e-9 * exact.tokens_per_s, (model, thresholds, concurrency)
        inside += error <= run.half_width + 1e-9 * exact.tokens_per_s
    assert inside >= 44, "95 % intervals should hold about 47 of 50"


@pytest.mark.parametrize(
    ("model", "thresholds", "concurrency"),
    [
        (r2r(), (1, 1), 16),
        (r2r(), (2, 10), 16),
        (ensemble(6.0, 12.0, 27.0), (1, 1, 1), 4),
        (r2r(0.05), (1, 3), 8),
    ],
)
def test_a_chain_above_the_limit_is_simulated_and_says_so(
    model: RoutingModel, thresholds: tuple[int, ...], concurrency: int
) -> None:
    exact = throughput(model, thresholds, concurrency, state_limit=200_000)
    estimate = throughput(model, thresholds, concurrency, state_limit=20)
    assert (exact.method, exact.half_width) == ("exact", 0.0)
    assert estimate.method == "simulated"
    assert 20 < estimate.states <= exact.states
    assert 0 < estimate.half_width < 1e-3 * exact.tokens_per_s
    assert abs(estimate.tokens_per_s - exact.tokens_per_s) < 2 * estimate.half_width


def test_a_simulated_estimate_depends_on_its_seed_only() -> None:
    first, again, other = (throughput(r2r(), (2, 2), 4, state_limit=1, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_states_that_do_not_fit_a_code_are_simulated() -> None:
    many = RoutingModel(np.full((7, 7), 1 / 7), np.ones((7, 7)), [5.0 + 0.1 * i for i in range(7)])
    assert throughput(many, (1,) * 7, 24).method == "simulated"


@settings(max_examples=80, deadline=None)
@given(cases())
def test_throughput_is_below_the_capacity_and_the_speed_without_waiting(
    case: tuple[RoutingModel, tuple[int, ...], int],
) -> None:
    model, thresholds, concurrency = case
    rate = throughput(model, thresholds, concurrency, state_limit=5000)
    most = rate.tokens_per_s - 3 * rate.half_width
    batches = range(1, concurrency + 1)
    step_s = [[model.step_ms(i, b) / 1e3 for b in batches] for i in range(model.size)]
    tokens = [model.tokens_per_step(i) for i in range(model.size)]
    capacity = sum(
        max(n * b / s for b, s in zip(batches, row, strict=True))
        for n, row in zip(tokens, step_s, strict=True)
    )
    fastest = concurrency * max(max(row) / min(s) for row, s in zip(model.commits, step_s, strict=True))
    assert rate.tokens_per_s >= 0
    assert most <= min(capacity, fastest) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_models_does_not_matter(
    case: tuple[RoutingModel, tuple[int, ...], int], source: random.Random
) -> None:
    model, thresholds, concurrency = case
    order = list(range(model.size))
    source.shuffle(order)
    assert model.batch_limits is not None
    shuffled = RoutingModel(
        routing=[[model.routing[i][j] for j in order] for i in order],
        commits=[[model.commits[i][j] for j in order] for i in order],
        latency_ms=[model.latency_ms[i] for i in order],
        quantum_ms=model.quantum_ms,
        batch_limits=[model.batch_limits[i] for i in order],
        entry=order.index(model.entry),
    )
    one = throughput(model, thresholds, concurrency, state_limit=5000)
    other = throughput(shuffled, [thresholds[i] for i in order], concurrency, state_limit=5000)
    assert one.method == other.method
    close = {"rel": 1e-9} if one.method == "exact" else {"abs": 2 * (one.half_width + other.half_width)}
    assert other.tokens_per_s == pytest.approx(one.tokens_per_s, **close)


@settings(max_examples=25, deadline=None)
@given(cases(), st.sampled_from([0.5, 2.0, 8.0]))
def test_time_and_tokens_have_no_scale(
    case: tuple[RoutingModel, tuple[int, ...], int], factor: float
) -> None:
    model, thresholds, concurrency = case

    def scaled(latency: object) -> object:
        assert callable(latency)
        return lambda batch: factor * latency(batch)

    slower = replace(
        model,
        latency_ms=[scaled(latency) for latency in model.latency_ms],
        quantum_ms=factor * model.quantum_ms,
        commits=[[3 * c for c in row] for row in model.commits],
    )
    one, other = (throughput(m, thresholds, concurrency, state_limit=2000) for m in (model, slower))
    assert other.tokens_per_s == pytest.approx(one.tokens_per_s * 3 / factor, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_eager_starts_are_always_feasible(case: tuple[RoutingModel, tuple[int, ...], int]) -> None:
    model, _, concurrency = case
    assert math.isfinite(throughput(model, (1,) * model.size, concurrency, state_limit=5000).tokens_per_s)


def test_thresholds_as_a_policy_give_the_same_chain() -> None:
    for thresholds in all_feasible(2, 4):
        assert policy_throughput(r2r(), Thresholds(thresholds), 4) == throughput(r2r(), thresholds, 4)
