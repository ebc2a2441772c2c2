"""Thresholds that can be met, whatever is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenflow.planner.policy import feasible

WANTED = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(wanted=WANTED, active=st.integers(1, 100))
def test_all_active_requests_can_never_wait_below_their_thresholds(wanted: list[int], active: int) -> None:
    got = feasible(wanted, active)
    assert sum(b - 1 for b in got) < active
    assert all(1 <= b <= most for b, most in zip(got, wanted, strict=True))


@given(wanted=WANTED, active=st.integers(1, 200))
def test_thresholds_that_can_be_met_are_left_alone(wanted: list[int], active: int) -> None:
    if sum(b - 1 for b in wanted) < active:
        assert feasible(wanted, active) == tuple(wanted)


@given(wanted=WANTED, active=st.integers(1, 100))
def test_no_threshold_is_lowered_more_than_it_must_be(wanted: list[int], active: int) -> None:
    got = feasible(wanted, active)
    if got != tuple(wanted):
        assert sum(b - 1 for b in got) == active - 1
        lowered = {b for b, most in zip(got, wanted, strict=True) if b < most}
        # Levelling from the top: what was lowered ends within one of the largest threshold.
        assert max(got) - min(lowered) <= 1


@given(wanted=WANTED, active=st.integers(0, 100), more=st.integers(0, 20))
def test_more_active_requests_never_lower_a_threshold(wanted: list[int], active: int, more: int) -> None:
    few, many = feasible(wanted, active), feasible(wanted, active + more)
    assert all(a <= b for a, b in zip(few, many, strict=True))


def test_without_requests_every_threshold_is_one() -> None:
    assert feasible([2, 9], 0) == (1, 1)
    assert feasible([], 3) == ()


def test_the_argument_is_not_changed() -> None:
    wanted = [2, 9]
    assert feasible(wanted, 4) == (2, 3)
    assert wanted == [2, 9]
