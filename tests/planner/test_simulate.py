"""The event-driven simulation, checked against hand-made timelines."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.models import r2r
from tokenflow.errors import PlanError
from tokenflow.planner import Decision, Lookahead, RoutingModel, Snapshot, Thresholds
from tokenflow.planner.policy import eager
from tokenflow.planner.routes import Visit, draw_route
from tokenflow.planner.simulate import replay, simulate

S, L = 0, 1


def test_a_recorded_route_is_replayed_step_by_step() -> None:
    # One request: small 6, large 27.9, small 6 ms; the first small step commits nothing.
    run = replay(r2r(), eager(2), [[(S, 0), (L, 1), (S, 1)]], 1)
    assert run.elapsed_ms == pytest.approx(39.9)
    assert run.tokens == 2
    assert run.tokens_per_s == pytest.approx(2 / 39.9e-3)
    assert run.mean_batch == (1.0, 1.0)
    assert run.busy == (pytest.approx(12 / 39.9), pytest.approx(27.9 / 39.9))


def test_a_threshold_makes_the_large_model_wait_for_a_second_request() -> None:
    routes = [[(S, 0), (L, 1)], [(S, 1), (S, 0), (L, 1)]]
    # Both small steps end at 6; the second request needs another until 12.
    late = replay(r2r(), Thresholds((1, 2)), routes, 2)
    assert (late.elapsed_ms, late.tokens) == (pytest.approx(12 + 27.9), 3)
    # Eager, the first request ends at 33.9, and from then on only one is left.
    soon = replay(r2r(), eager(2), routes, 2)
    assert (soon.elapsed_ms, soon.tokens) == (pytest.approx(6 + 27.9), 2)


def test_the_next_route_takes_the_place_of_one_that_ended() -> None:
    routes = [[(S, 1)], [(S, 1)] * 4, [(S, 1)] * 2]
    run = replay(r2r(), eager(2), routes, 2)
    # Ends when the third route has, at 18 ms: steps of two requests each.
    assert (run.elapsed_ms, run.tokens, run.mean_batch[S]) == (pytest.approx(18.0), 6, 2.0)


def test_a_batch_limit_leaves_the_rest_waiting_in_order() -> None:
    model = RoutingModel([[1]], [[1]], [10.0], batch_limits=[2])
    run = replay(model, eager(1), [[(0, 1)] * 2, [(0, 1)] * 2, [(0, 1)] * 2], 3)
    # Requests 0 and 1, then 2 and 0, which is then done.
    assert (run.elapsed_ms, run.tokens) == (pytest.approx(20.0), 4)


def test_a_latency_table_by_batch_size_is_used() -> None:
    model = RoutingModel([[1]], [[1]], [[10.0, 14.0]])
    assert replay(model, eager(1), [[(0, 1)]] * 2, 2).elapsed_ms == pytest.approx(14.0)


def test_drawn_routes_replayed_give_the_run_that_drew_them() -> None:
    model = r2r()
    steps = 4000
    routes = [
        list(itertools.islice(draw_route(model, random.Random(f"7/route/{r}")), steps)) for r in range(4)
    ]
    run = replay(model, Thresholds((1, 3)), routes, 4)
    assert run.tokens_per_s == pytest.approx(207.95, rel=0.03)
    assert run.half_width < 0.02 * run.tokens_per_s
    shares = Counter(visit.model for route in routes for visit in route)
    assert shares[L] / shares[S] == pytest.approx(0.35, rel=0.05)


def test_a_run_depends_on_its_seed_only() -> None:
    first, again, other = (simulate(r2r(), eager(2), 4, steps=3000, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_runs_of_one_seed_see_the_same_routes_whatever_the_policy() -> None:
    # With every request alone in its step, throughput depends on the routes only.
    runs = [simulate(r2r(), policy, 1, steps=5000, seed=3) for policy in (eager(2), Lookahead.of(r2r(), 1))]
    assert runs[0] == runs[1]


def test_runs_of_fixed_length_are_faster_than_the_geometric_model_says() -> None:
    # Every third small step hands over, for all requests in step: no batch is ever fragmented.
    run = simulate(r2r(run_lengths=[{3: 1.0}, None]), eager(2), 4, steps=5000)
    assert run.tokens_per_s == pytest.approx(4 * 3 / (3 * 6.0 + 27.9) * 1e3, rel=1e-3)
    assert run.tokens_per_s > 1.1 * simulate(r2r(1 / 3), eager(2), 4, steps=5000).tokens_per_s


def test_measured_run_lengths_are_drawn_by_their_weights() -> None:
    lengths = Counter({1: 30, 5: 10})
    route = itertools.islice(draw_route(r2r(run_lengths=[lengths, None]), random.Random(1)), 60_000)
    groups = [(where, len(list(group))) for where, group in itertools.groupby(visit.model for visit in route)]
    runs = Counter(length for where, length in groups[:-1] if where == S)
    assert runs.keys() == {1, 5}
    assert runs[5] / runs.total() == pytest.approx(0.25, abs=0.01)


def test_a_geometric_run_length_distribution_changes_nothing() -> None:
    geometric = {n: 0.35 * 0.65 ** (n - 1) for n in range(1, 80)}
    plain = simulate(r2r(), Thresholds((1, 3)), 4, steps=40_000)
    drawn = simulate(r2r(run_lengths=[geometric, None]), Thresholds((1, 3)), 4, steps=40_000, seed=5)
    assert abs(plain.tokens_per_s - drawn.tokens_per_s) < 2 * (plain.half_width + drawn.half_width)


def test_a_dropped_token_counts_nothing_and_the_run_ends_in_the_hand_over() -> None:
    visits = list(itertools.islice(draw_route(r2r(run_lengths=[{2: 1.0}, None]), random.Random(1)), 6))
    assert visits == [Visit(S, 1.0), Visit(S, 0.0), Visit(L, 1.0)] * 2


def test_jitter_spreads_latencies_around_their_mean() -> None:
    constant = RoutingModel([[1]], [[1]], [10.0])
    run = simulate(replace(constant, jitter=0.2), eager(1), 1, steps=20_000)
    assert run.tokens_per_s == pytest.approx(100.0, rel=0.01)
    assert 0 < run.half_width < 1.0
    assert simulate(constant, eager(1), 1, steps=20_000).half_width == pytest.approx(0.0, abs=1e-6)


def test_jitter_smooths_the_resonance_above_an_integer_ratio() -> None:
    below, above = r2r(large_ms=12.0), r2r(large_ms=12.1)
    policy = Thresholds((1, 2))
    sharp = [simulate(m, policy, 8, steps=30_000).tokens_per_s for m in (below, above)]
    jittery = [replace(m, jitter=0.05) for m in (below, above)]
    smooth = [simulate(m, policy, 8, steps=30_000).tokens_per_s for m in jittery]
    assert sharp[0] > 1.08 * sharp[1]
    assert smooth[0] < 1.03 * smooth[1]


class TwoMsLate:
    """Eager at the small model; the large one starts 2 ms after a request has reached it."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def decide(self, snapshot: Snapshot) -> Decision:
        small = (S,) if snapshot.queued[S] and not snapshot.running[S] else ()
        if not snapshot.queued[L] or snapshot.running[L]:
            return Decision(small)
        self.asked.append(snapshot.residual_ms[S])
        return Decision(small, 2.0) if small else Decision((L,))


def test_a_policy_is_asked_again_when_the_time_it_named_has_passed() -> None:
    one_at_a_time = RoutingModel([[0.5, 0.5], [1, 0]], [[1, 0], [1, 0]], [6.0, 20.0], batch_limits=[1, None])
    policy = TwoMsLate()
    run = replay(one_at_a_time, policy, [[(S, 0), (L, 1)], [(S, 1)] * 9], 2)
    # At 6 ms the first request reaches the large model, which starts at 8: 4 ms before the small one ends.
    assert policy.asked == [pytest.approx(0.0), pytest.approx(4.0)]
    assert (run.elapsed_ms, run.tokens) == (pytest.approx(28.0), 4)


class Idle:
    """Never starts anything."""

    def decide(self, snapshot: Snapshot) -> Decision:
        return Decision(())


class Impatient:
    """Wants to be asked again at once."""

    def decide(self, snapshot: Snapshot) -> Decision:
        return Decision((0,) if snapshot.queued[0] and not snapshot.running[0] else (), 0.0)


@pytest.mark.parametrize(
    ("policy", "message"),
    [(Idle(), "starts nothing although no model runs"), (Impatient(), "asks again after 0 ms")],
)
def test_a_policy_that_would_hang_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(r2r(), policy, 2)


def test_a_run_too_short_for_an_interval_is_refused() -> None:
    with pytest.raises(PlanError, match="steps must be at least 320, got 100"):
        simulate(r2r(), eager(2), 2, steps=100)


@pytest.mark.parametrize(
    ("routes", "concurrency", "message"),
    [
        ([[(S, 1)]], 2, "2 requests at a time need as many routes, got 1"),
        ([[(S, 1)], []], 2, "route 1 is empty"),
        ([[(S, 1), (2, 1)]], 1, "route 0, visit 1: there is no model 2 (models are 0 to 1)"),
        ([[(S, -1)]], 1, "route 0, visit 0: commits must be a number of at least 0, got -1"),
        ([[(S, 1)]], 0, "concurrency must be an integer from 1 to 1,024"),
    ],
)
def test_impossible_routes_are_refused(routes: Any, concurrency: int, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        replay(r2r(), eager(2), routes, concurrency)
    assert message in str(caught.value)
