"""The lookahead rule, decision by decision, and what it must never do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import all_feasible, ensemble, r2r
from tokenflow.planner import Decision, Lookahead, RoutingModel, Snapshot, policy_throughput
from tokenflow.planner.policy import eager
from tokenflow.planner.simulate import simulate


def test_a_small_step_waits_for_a_large_batch_that_is_about_to_end() -> None:
    policy = Lookahead.of(r2r(), 16)
    # 2 requests wait 1 ms each, so that 8 need not wait 5 ms each for a step that starts now.
    assert policy.decide(Snapshot((2, 6), (0, 8), (0, 1.0))) == Decision((), 1.0)


@pytest.mark.parametrize(
    ("queued", "left", "waits"),
    # k x < n (L - x), with n = 4 requests that return and L = 6 ms.
    [(4, 2.9, True), (4, 3.1, False), (8, 1.9, True), (8, 2.1, False), (1, 4.7, True), (1, 4.9, False)],
)
def test_waiting_pays_while_it_costs_less_than_it_saves(queued: int, left: float, waits: bool) -> None:
    decision = Lookahead.of(r2r(), 16).decide(Snapshot((queued, 0), (0, 4), (0, left)))
    assert decision == (Decision((), left) if waits else Decision((0,)))


def test_a_large_batch_does_not_wait_for_a_small_step_that_has_only_begun() -> None:
    # What that step brings would come again from the next one: only its head start counts, and it has none.
    policy = Lookahead.of(r2r(0.05, 6.0, 60.0), 4)
    assert policy.decide(Snapshot((3, 1), (0, 0), (0, 0))) == Decision((0, 1))


def test_a_large_batch_waits_for_a_small_step_that_is_nearly_over() -> None:
    policy = Lookahead.of(r2r(0.5), 16)
    assert policy.decide(Snapshot((0, 2), (10, 0), (0.5, 0))) == Decision((), 0.5)


@given(
    st.floats(1.0, 9.0),
    st.floats(1.0, 60.0),
    st.floats(1.0, 60.0),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(0, 8),
    st.tuples(st.floats(-5.0, 60.0), st.floats(-5.0, 60.0)),
)
@settings(deadline=None)
def test_as_many_steps_start_without_a_wait_as_it_says(
    small: float, mid: float, large: float, batch: int, second: int, third: int, left: tuple[float, float]
) -> None:
    routing = [[0.6, 0.2, 0.2], [0.5, 0.5, 0], [1, 0, 0]]
    policy = Lookahead.of(RoutingModel(routing, [[1, 0, 0]] * 3, [small, mid, large]), 8)
    running = (0, second, third)
    steps = policy.free_steps(0, batch, running, (0.0, *left))
    if not any(running):
        assert steps == math.inf
        return
    for step in range(1, int(min(steps, 20)) + 1):
        residual = [0.0, *(each - step * small for each in left)]
        assert [policy.hold_ms(0, waiting, running, residual) for waiting in range(1, batch + 1)] == [
            0
        ] * batch


def test_steps_are_free_until_the_last_one_that_ends_before_the_other_models_batch() -> None:
    policy = Lookahead.of(r2r(0.05, 6.0, 60.0), 8)
    assert policy.free_steps(0, 4, (0, 3), (0.0, 60.0)) == 9
    assert policy.free_steps(0, 4, (0, 3), (0.0, 11.9)) == 0
    assert policy.free_steps(0, 4, (0, 3), (0.0, -0.1)) == 0
    assert policy.free_steps(1, 2, (4, 0), (6.0, 0.0)) == 0


def test_thresholds_hold_a_batch_back_that_the_rule_would_start() -> None:
    snapshot = Snapshot((0, 4), (4, 0), (6.0, 0))
    assert Lookahead.of(r2r(), 8).decide(snapshot).start == (1,)
    assert Lookahead.of(r2r(), 8, (1, 5)).decide(snapshot) == Decision((), math.inf)


def test_a_full_batch_starts_whatever_comes() -> None:
    limited = RoutingModel([[0.5, 0.5], [1, 0]], [[1, 0], [1, 0]], [6.0, 28.0], batch_limits=[2, None])
    assert Lookahead.of(limited, 8).decide(Snapshot((2, 0), (0, 6), (0, 0.1))).start == (0,)
    assert Lookahead.of(r2r(), 8).decide(Snapshot((2, 0), (0, 6), (0, 0.1))).start == ()


def test_a_wait_that_makes_the_batch_much_slower_does_not_pay() -> None:
    steep = RoutingModel([[0.5, 0.5], [1, 0]], [[1, 0], [1, 0]], [lambda batch: 2.0 + batch, 28.0])
    flat = RoutingModel([[0.5, 0.5], [1, 0]], [[1, 0], [1, 0]], [6.0, 28.0])
    snapshot = Snapshot((4, 0), (0, 4), (0, 1.0))
    assert Lookahead.of(flat, 8).decide(snapshot).start == ()
    assert Lookahead.of(steep, 8).decide(snapshot).start == (0,)


def test_several_returning_batches_count_together() -> None:
    tree = RoutingModel([[0.6, 0.2, 0.2], [1, 0, 0], [1, 0, 0]], [[1, 0, 0]] * 3, [6.0, 20.0, 20.0])
    policy = Lookahead.of(tree, 8)
    # 4 x > 1 (6 - x) for the first alone, but both are back within 1.3 ms.
    assert policy.decide(Snapshot((4, 0, 0), (0, 1, 0), (0, 1.3, 0))).start == (0,)
    assert policy.decide(Snapshot((4, 0, 0), (0, 1, 3), (0, 1.3, 1.3))) == Decision((), 1.3)


def test_an_overdue_batch_is_waited_for_less_and_less_often() -> None:
    policy = Lookahead.of(r2r(), 16)
    waits = [policy.decide(Snapshot((3, 0), (0, 8), (0, -late))).ask_again_ms for late in (0, 0.5, 1.0, 2.0)]
    assert waits == [pytest.approx(0.279), 0.5, 1.0, 2.0]
    assert policy.decide(Snapshot((3, 0), (0, 8), (0, -30.0))).start == (0,)


def test_a_batch_from_before_the_load_fell_is_still_understood() -> None:
    assert Lookahead.of(r2r(), 2).decide(Snapshot((1, 0), (0, 10), (0, 1.0))) == Decision((), 1.0)


@settings(max_examples=200)
@given(st.data())
def test_something_always_runs_after_a_decision(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from([r2r(), r2r(0.5, 6.0, 12.1), ensemble(6.0, 12.0, 27.9)]))
    concurrency = data.draw(st.integers(1, 6))
    thresholds = data.draw(st.sampled_from(all_feasible(model.size, concurrency)))
    where = data.draw(
        st.lists(st.integers(0, 2 * model.size - 1), min_size=concurrency, max_size=concurrency)
    )
    queued = tuple(where.count(i) for i in range(model.size))
    running = tuple(where.count(model.size + i) for i in range(model.size))
    residual = tuple(
        data.draw(st.floats(-5, model.step_ms(i, b))) if b else 0.0 for i, b in enumerate(running)
    )
    decision = Lookahead.of(model, concurrency, thresholds).decide(Snapshot(queued, running, residual))
    assert any(running) or decision.start
    assert decision.ask_again_ms > 0
    for i in decision.start:
        assert not running[i]
        assert queued[i] >= thresholds[i]


@pytest.mark.parametrize(("model", "concurrency"), [(r2r(0.2, 6.0, 12.1), 8), (ensemble(6.0, 13.0, 27.0), 3)])
def test_the_simulated_policy_agrees_with_its_chain(model: RoutingModel, concurrency: int) -> None:
    policy = Lookahead.of(model, concurrency)
    exact = policy_throughput(model, policy, concurrency)
    assert exact.method == "exact"
    run = simulate(model, policy, concurrency, steps=60_000)
    assert abs(run.tokens_per_s - exact.tokens_per_s) < 2 * run.half_width


def test_looking_ahead_still_gains_when_latencies_jitter() -> None:
    model = r2r(0.35, 60.0, 121.0, jitter=0.05)
    ahead, static = (
        simulate(model, policy, 8, steps=40_000) for policy in (Lookahead.of(model, 8, (1, 2)), eager(2))
    )
    assert ahead.tokens_per_s > 1.05 * static.tokens_per_s
