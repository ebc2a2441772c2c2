"""Start policies between and beyond the concurrencies that were planned."""

from __future__ import annotations

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
    return policy.thresholds


def test_what_was_planned_is_used_where_it_was_planned() -> None:
    assert TABLE.at(4) == Thresholds((1, 3))
    assert isinstance(TABLE.at(16), Lookahead)
    assert [thresholds(n) for n in (1, 4, 8, 16)] == [(1, 1), (1, 3), (1, 5), (2, 10)]


def test_thresholds_between_two_concurrencies_lie_between_theirs() -> None:
    assert [thresholds(n) for n in (2, 3, 6, 12)] == [(1, 2), (1, 2), (1, 4), (2, 8)]


def test_thresholds_beyond_the_largest_go_on_growing() -> None:
    assert [thresholds(n) for n in (24, 32, 64)] == [(3, 15), (3, 20), (5, 39)]


def test_a_plan_that_waits_for_nobody_is_not_made_to_wait_by_more_requests() -> None:
    table = PolicyTable(r2r(), [Planned(2, (1, 1), True, 155.1)])
    assert table.at(16).thresholds == (1, 1)


def test_an_empty_table_waits_for_nobody() -> None:
    table = PolicyTable(r2r(), [])
    assert [table.at(n) for n in (0, 1, 9)] == [Thresholds((1, 1))] * 3


def test_batch_limits_bound_what_is_waited_for() -> None:
    table = PolicyTable(r2r(batch_limits=[None, 4]), [Planned(4, (1, 3), False, 1.0)])
    assert table.at(100) == Thresholds((1, 4))


@given(
    planned=st.dictionaries(
        st.integers(2, 40), st.tuples(st.tuples(st.integers(1, 30), st.integers(1, 30)), st.booleans())
    ),
    concurrency=st.integers(1, 80),
)
def test_every_policy_can_be_met(planned: dict[int, tuple[tuple[int, int], bool]], concurrency: int) -> None:
    entries = [Planned(n, feasible(b, n), ahead, 1.0) for n, (b, ahead) in planned.items()]
    policy = PolicyTable(r2r(), entries).at(concurrency)
    assert check_thresholds(r2r(), policy.thresholds, concurrency) == policy.thresholds
