"""Thresholds that can be met, whatever the recipe asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenflow.actors.thresholds import feasible

WANTED = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 40), min_size=1)


@given(wanted=WANTED, active=st.integers(1, 100))
def test_all_active_requests_can_never_wait_below_their_thresholds(
    wanted: dict[str, int], active: int
) -> None:
    got = feasible(wanted, active)
    assert sum(b - 1 for b in got.values()) < active
    assert set(got) == set(wanted)
    assert all(1 <= got[name] <= wanted[name] for name in wanted)


@given(wanted=WANTED, active=st.integers(1, 200))
def test_thresholds_that_can_be_met_are_left_alone(wanted: dict[str, int], active: int) -> None:
    if sum(b - 1 for b in wanted.values()) < active:
        assert feasible(wanted, active) == wanted


@given(wanted=WANTED, active=st.integers(1, 100))
def test_no_threshold_is_lowered_more_than_it_must_be(wanted: dict[str, int], active: int) -> None:
    got = feasible(wanted, active)
    if got != wanted:
        assert sum(b - 1 for b in got.values()) == active - 1
        lowered = {got[name] for name in got if got[name] < wanted[name]}
        # Levelling from the top: what was lowered ends within one of the largest threshold.
        assert max(got.values()) - min(lowered) <= 1


@given(wanted=WANTED, active=st.integers(0, 100), more=st.integers(0, 20))
def test_more_active_requests_never_lower_a_threshold(wanted: dict[str, int], active: int, more: int) -> None:
    few, many = feasible(wanted, active), feasible(wanted, active + more)
    assert all(few[name] <= many[name] for name in wanted)


def test_without_requests_every_threshold_is_one() -> None:
    assert feasible({"slm": 2, "llm": 9}, 0) == {"slm": 1, "llm": 1}


def test_the_argument_is_not_changed() -> None:
    wanted = {"slm": 2, "llm": 9}
    assert feasible(wanted, 4) == {"slm": 2, "llm": 3}
    assert wanted == {"slm": 2, "llm": 9}
