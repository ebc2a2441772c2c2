"""Start policies between and beyond the concurrencies that were planned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.models import r2r
from tokenflow.planner import Lookahead, Planned, PolicyTable, Thresholds
from tokenflow.planner.model import check_thresholds
from tokenflow.planner.policy import feasible

TABLE = PolicyTable(
    r2r(),
    [
        Planned(4, (1, 3), False, 208.0),
        Planned(8, (1, 5), True, 403.7),
        Planned(16, (2, 10), True, 790.0),
    ],
)


def thresholds(concurrency: int) -> tuple[int, ...]:
    policy = TABLE.at(concurrency)
    return policy.values if isinstance(policy, Thresholds) else policy.thresholds  # type: ignore[attr-defined]


def test_what_was_planned_is_used_where_it_was_planned() -> None:
    assert TABLE.at(4) == Thresholds((1, 3))
    assert isinstance(TABLE.at(16), Lookahead)
    assert [thresholds(n) for n in (1, 4, 8, 16)] == [(1, 1), (1, 3), (1, 5), (2, 10)]


def test_thresholds_between_two_concurrencies_lie_between_theirs() -> None:
    assert [thresholds(n) for n in (2, 3, 6, 12)] == [(1, 2), (1, 2), (1, 4), (2, 8)]


def test_thresholds_beyond_the_largest_grow_in_its_proportion() -> None:
    assert [thresholds(n) for n in (24, 32, 64)] == [(3, 15), (4, 20), (8, 40)]


def test_an_empty_table_waits_for_nobody() -> None:
    table = PolicyTable(r2r(), [])
    assert [table.at(n) for n in (0, 1, 9)] == [Thresholds((1, 1))] * 3


def test_batch_limits_bound_what_is_waited_for() -> None:
    table = PolicyTable(r2r(batch_limits=[None, 4]), [Planned(4, (1, 3), False, 1.0)])
    assert table.at(100) == Thresholds((25, 4))


@given(
    planned=st.dictionaries(
        st.integers(2, 40), st.tuples(st.tuples(st.integers(1, 30), st.integers(1, 30)), st.booleans())
    ),
    concurrency=st.integers(1, 80),
)
def test_every_policy_can_be_met(planned: dict[int, tuple[tuple[int, int], bool]], concurrency: int) -> None:
    entries = [Planned(n, feasible(b, n), ahead, 1.0) for n, (b, ahead) in planned.items()]
    policy = PolicyTable(r2r(), entries).at(concurrency)
    values = policy.values if isinstance(policy, Thresholds) else policy.thresholds  # type: ignore[attr-defined]
    assert check_thresholds(r2r(), values, concurrency) == values


@pytest.mark.parametrize(
    ("wanted", "concurrency", "met"),
    [
        ((1, 4), 4, (1, 4)),
        ((1, 4), 3, (1, 3)),
        ((3, 3), 4, (2, 3)),
        ((5, 9), 1, (1, 1)),
        ((2, 2), 0, (1, 1)),
        ((4, 4, 4), 5, (2, 2, 3)),
        ((), 3, ()),
    ],
)
def test_thresholds_are_lowered_from_the_largest_until_they_can_be_met(
    wanted: tuple[int, ...], concurrency: int, met: tuple[int, ...]
) -> None:
    assert feasible(wanted, concurrency) == met
