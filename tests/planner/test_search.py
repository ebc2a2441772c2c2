"""Searches: the best thresholds are found, quickly, and the plan says how sure it is."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.planner.models import all_feasible, ensemble, r2r
from tokenflow.planner import (
    Lookahead,
    RoutingModel,
    Thresholds,
    Throughput,
    best_policy,
    best_thresholds,
    candidates,
    optimum,
    policy_throughput,
    throughput,
)


@pytest.mark.parametrize(
    ("concurrency", "best"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 2)), (4, (1, 3)), (8, (1, 5))]
)
def test_the_best_thresholds_of_the_paper_are_found(concurrency: int, best: tuple[int, ...]) -> None:
    plan = best_thresholds(r2r(), concurrency)
    assert plan.thresholds == best
    assert plan.method == "exact"
    assert plan.tokens_per_s == pytest.approx(throughput(r2r(), best, concurrency).tokens_per_s)
    assert plan.gain == pytest.approx(
        plan.tokens_per_s / throughput(r2r(), (1, 1), concurrency).tokens_per_s - 1
    )


def test_sixteen_requests_are_planned_in_five_seconds_with_a_threshold_for_the_small_model_too() -> None:
    began = time.process_time()
    plan = best_thresholds(r2r(), 16)
    assert time.process_time() - began < 5
    assert plan.thresholds == (2, 10)
    assert (plan.method, plan.tokens_per_s) == ("exact", pytest.approx(785.4, abs=0.1))
    assert plan.eager.tokens_per_s == pytest.approx(733.62, abs=0.01)
    assert sorted(thresholds for thresholds, _ in plan.table) == all_feasible(2, 16)


def test_three_models_and_eight_requests_are_planned_in_a_minute() -> None:
    began = time.process_time()
    plan = best_thresholds(ensemble(6.0, 12.0, 27.9), 8)
    assert time.process_time() - began < 60
    assert plan.thresholds == (1, 1, 3)
    assert plan.method == "simulated"
    assert plan.throughput.half_width < 1e-3 * plan.tokens_per_s
    assert len(plan.table) == 120


@pytest.mark.parametrize(
    "model",
    [
        r2r(0.2, 6.0, 12.1),
        ensemble(6.0, 12.0, 24.0),
        RoutingModel([[0.8, 0.2], [0.5, 0.5]], [[1, 1]] * 2, [6.0, 30.0]),
    ],
)
def test_a_search_agrees_with_trying_everything(model: RoutingModel) -> None:
    plan = best_thresholds(model, 5)
    every = {b: throughput(model, b, 5) for b in all_feasible(model.size, 5)}
    best = max(rate.tokens_per_s for rate in every.values())
    assert plan.tokens_per_s == pytest.approx(best)
    assert dict(plan.table).keys() == every.keys()
    equal = {b for b, rate in every.items() if rate.tokens_per_s >= best * (1 - 1e-3)}
    assert {plan.thresholds, *plan.ties} == equal


def test_the_table_is_sorted_and_rough_only_far_from_the_best() -> None:
    plan = best_thresholds(r2r(0.2), 16)
    rates = [rate.at_least for _, rate in plan.table]
    assert rates == sorted(rates, reverse=True)
    assert plan.table[0] == (plan.thresholds, plan.throughput)
    for thresholds, rate in plan.table:
        close = rate.tokens_per_s > 0.99 * plan.tokens_per_s
        assert rate.method == "exact" or not close or rate.half_width > 0, thresholds


def test_a_search_whose_chains_are_all_too_large_finds_the_same_thresholds() -> None:
    plan = best_thresholds(r2r(), 4, state_limit=1)
    assert plan.method == "simulated"
    assert plan.thresholds == (1, 3)
    assert plan.tokens_per_s == pytest.approx(207.95, rel=2e-3)
    assert plan.eager.tokens_per_s == pytest.approx(187.19, rel=2e-3)


def test_a_model_that_is_never_reached_keeps_threshold_one() -> None:
    spare = RoutingModel([[0.65, 0.35, 0], [1, 0, 0], [1, 0, 0]], [[1, 0, 0]] * 3, [6.0, 27.9, 9.0])
    plan = best_thresholds(spare, 4)
    assert plan.thresholds == (1, 3, 1)
    assert plan.tokens_per_s == pytest.approx(207.95, abs=0.01)


def test_thresholds_stay_within_the_batch_limits() -> None:
    plan = best_thresholds(replace(r2r(), batch_limits=[None, 2]), 8)
    assert {b for _, b in dict(plan.table)} == {1, 2}
    assert plan.tokens_per_s <= best_thresholds(r2r(), 8).tokens_per_s


def test_too_many_candidates_are_searched_on_a_grid_and_then_around_its_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "_MOST", 40)
    plan = best_thresholds(r2r(), 16)
    assert plan.thresholds == (2, 10)
    assert len(plan.table) < 80 < len(all_feasible(2, 16))
    assert (1, 1) in dict(plan.table)


@pytest.mark.parametrize(("size", "concurrency"), [(4, 24), (4, 64), (5, 32), (6, 12)])
def test_a_grid_stays_small_and_feasible_for_many_models(size: int, concurrency: int) -> None:
    model = RoutingModel([[1 / size] * size] * size, [[1] * size] * size, [5.0] * size)
    found: dict[tuple[int, ...], Throughput] = {}
    for batch in candidates.candidate_sets(model, concurrency, found):
        assert 0 < len(batch) <= 6000
        assert not set(batch) & set(found)
        assert all(sum(b) - size < concurrency for b in batch)
        found |= {b: Throughput(float(sum(b)), "exact") for b in batch}
    assert (1,) * size in found


def test_less_effort_is_quicker_and_finds_nearly_as_good_a_policy() -> None:
    """A load as it is measured on a CPU: latencies grow with the batch, and chains are too large to solve."""
    growing = RoutingModel(
        [[0.9, 0.1], [0.9, 0.1]],
        [[1, 0], [1, 1]],
        [{1: 2.5, 2: 2.9, 4: 3.4, 8: 4.6}, {1: 4.2, 2: 5.1, 4: 6.8, 8: 10.2}],
        quantum_ms=0.042,
    )
    taken, found = [], []
    for effort in (1.0, 0.2):
        began = time.process_time()
        found.append(best_policy(growing, 8, state_limit=2000, effort=effort))
        taken.append(time.process_time() - began)
    assert taken[1] < 0.6 * taken[0]
    best, rough = (
        policy_throughput(growing, plan.policy, 8, state_limit=2000).tokens_per_s for plan in found
    )
    assert rough > 0.99 * best


def test_progress_reaches_the_number_of_candidates() -> None:
    seen: list[tuple[int, int]] = []
    best_thresholds(r2r(), 8, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (36, 36)
    assert all(0 <= done <= total == 36 for done, total in seen)


def test_the_lookahead_policy_wins_just_above_an_integer_ratio() -> None:
    plan = best_policy(r2r(0.35, 60.0, 121.0), 8)
    assert isinstance(plan.policy, Lookahead)
    assert plan.throughput.tokens_per_s > 1.05 * plan.static.tokens_per_s
    assert plan.throughput.tokens_per_s == pytest.approx(
        optimum(r2r(0.35, 60.0, 121.0), 8).tokens_per_s, rel=1e-3
    )


def test_static_thresholds_stay_where_looking_ahead_gains_nothing() -> None:
    plan = best_policy(r2r(0.35, 6.0, 60.0), 4)
    assert plan.policy == Thresholds((1, 4))
    assert plan.throughput == plan.static.throughput
    assert plan.lookahead_throughput.tokens_per_s <= plan.throughput.tokens_per_s * (1 + 1e-9)


@pytest.mark.parametrize("concurrency", [2, 8])
@pytest.mark.parametrize("p", [0.05, 0.2, 0.35, 0.5])
@pytest.mark.parametrize("ratio", [2.02, 4.65, 10.0])
def test_the_best_policy_is_close_to_the_best_of_all_policies(
    concurrency: int, p: float, ratio: float
) -> None:
    model = r2r(p, 6.0, 6.0 * ratio)
    plan, most = best_policy(model, concurrency), optimum(model, concurrency).tokens_per_s
    assert 0.995 * most <= plan.throughput.tokens_per_s <= most * (1 + 1e-9)
    assert plan.throughput.tokens_per_s >= plan.static.tokens_per_s


def test_measured_run_lengths_change_the_plan() -> None:
    uniform = r2r(run_lengths=[dict.fromkeys(range(1, 6), 1), None])
    plan = best_thresholds(uniform, 4)
    assert plan.method == "simulated"
    assert plan.thresholds != best_thresholds(replace(uniform, run_lengths=None), 4).thresholds
    assert plan.tokens_per_s > 1.02 * throughput(uniform, (1, 3), 4).tokens_per_s
    assert len(plan.table) == 10


def test_a_plan_under_jitter_knows_that_the_resonance_is_gone() -> None:
    sharp, smooth = (best_policy(r2r(large_ms=12.1, jitter=jitter), 2) for jitter in (0.0, 0.05))
    assert smooth.static.tokens_per_s > 1.02 * sharp.static.tokens_per_s
    assert smooth.throughput.tokens_per_s > 1.02 * smooth.static.tokens_per_s
    assert smooth.throughput.method == "simulated"
