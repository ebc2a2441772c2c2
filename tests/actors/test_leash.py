"""How far the router lets a worker go by itself."""

from __future__ import annotations

import math

import pytest

from tokenflow.actors.leash import Leash
from tokenflow.actors.sequence import Limits, Sequence
from tokenflow.types import SamplingParams
from tokenflow.wire.messages import RowDone


class Nobody:
    """Nobody asked for these responses."""

    def committed(self, token: int) -> bool:
        raise AssertionError

    def wake(self, sequence: Sequence) -> None:
        raise AssertionError


def sequence(booked: int, max_tokens: int = 100) -> Sequence:
    limits = Limits(max_tokens, frozenset())
    made = Sequence(1, [1, 40, 50], SamplingParams(), 0, (), limits, Nobody(), 1, prompt_tokens=3)
    made.booked = booked
    return made


class Holds:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def always(batch: int) -> tuple[int, float]:
    """Any request is enough for the next batch, whatever the other models do."""
    return 1, math.inf


@pytest.fixture
def hold() -> Holds:
    return Holds()


def test_a_worker_goes_as_far_as_memory_is_booked_and_the_response_may_be_long() -> None:
    leash = Leash(True, always)
    assert leash.let([sequence(booked=12)], alone=True) == (1, {1: 8})
    assert leash.let([sequence(booked=12, max_tokens=5)], alone=True) == (1, {1: 4})
    assert leash.let([sequence(booked=0)], alone=True) == (1, {1: 0})


@pytest.mark.parametrize(
    ("possible", "least", "steps", "alone"),
    [(False, 1, 9, True), (True, 0, 9, True), (True, 1, 0, True), (True, 1, 9, False)],
)
def test_a_worker_waits_where_the_next_step_is_not_certain(
    possible: bool, least: int, steps: float, alone: bool
) -> None:
    assert Leash(possible, lambda batch: (least, steps)).let([sequence(12)], alone=alone) == (0, {})


def test_a_worker_goes_no_further_than_is_certain() -> None:
    leash = Leash(True, lambda batch: (2, 5 - batch))
    assert leash.let([sequence(booked=12)], alone=True) == (2, {1: 4})
    assert leash.let([sequence(booked=6)], alone=True) == (2, {1: 2})


def test_a_step_without_requests_is_followed_by_none() -> None:
    def free(batch: int) -> tuple[int, float]:
        raise AssertionError("there is nothing to go on with")

    assert Leash(True, free).let([], alone=True) == (0, {})


def test_a_worker_is_held_once_when_something_changes(hold: Holds) -> None:
    leash = Leash(True, always)
    leash.let([sequence(12)], alone=True)
    leash.began(hold)
    leash.pull()
    leash.pull()
    assert hold.count == 1


def test_a_worker_that_waits_anyway_or_has_ended_is_not_held(hold: Holds) -> None:
    leash = Leash(True, always)
    leash.let([sequence(12)], alone=False)
    leash.began(hold)
    leash.pull()
    leash.ended()
    leash.pull()
    assert hold.count == 0


def test_a_worker_that_had_to_be_held_is_not_let_go_in_the_next_step(hold: Holds) -> None:
    leash = Leash(True, always)
    leash.let([sequence(12)], alone=True)
    leash.began(hold)
    leash.pull()
    leash.ended()
    assert leash.let([sequence(12)], alone=True) == (0, {})
    leash.began(hold)
    leash.ended()
    assert leash.let([sequence(12)], alone=True) == (1, {1: 8})


def test_where_requests_hardly_ever_stay_it_is_not_worth_the_memory() -> None:
    leash = Leash(True, always)
    for _ in range(30):
        leash.saw([RowDone(1, 0, 4, 9, 0, 2)])
    assert not leash.worthwhile
    assert leash.let([sequence(12)], alone=True) == (0, {})
    for _ in range(30):
        leash.saw([RowDone(1, 0, 4, 9)])
    assert leash.worthwhile
