"""Start policies fit the requests that there are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.models import r2r
from tokenflow.actors.policies import Policies
from tokenflow.actors.reach import Reach
from tokenflow.actors.sequence import Limits, Sequence
from tokenflow.dsl.load import load_recipe
from tokenflow.planner import Lookahead, Planned, PolicyTable, Thresholds
from tokenflow.types import SamplingParams


def test_without_a_plan_the_recipe_s_thresholds_hold() -> None:
    policies = Policies([2, 10])
    assert policies.at(16, (16, 16)) == Thresholds((2, 10))
    assert policies.at(4, (4, 4)) == Thresholds((2, 3))
    assert policies.at(0, (0, 0)) == Thresholds((1, 1))


def test_what_was_planned_takes_their_place_at_once() -> None:
    policies = Policies([1, 1])
    assert policies.at(16, (16, 16)) == Thresholds((1, 1))
    policies.use(PolicyTable(r2r(), [Planned(16, (1, 10), True, 796.2), Planned(2, (1, 2), False, 110.3)]))
    assert policies.at(2, (2, 2)) == Thresholds((1, 2))
    ahead = policies.at(16, (16, 16))
    assert isinstance(ahead, Lookahead)
    assert ahead.thresholds == (1, 10)


def test_a_model_waits_for_no_more_than_can_come_to_it() -> None:
    policies = Policies([1, 1])
    policies.use(PolicyTable(r2r(), [Planned(16, (4, 10), True, 1.0)]))
    assert policies.at(16, (16, 3)).thresholds == (4, 3)
    assert policies.at(16, (0, 16)).thresholds == (1, 10)


@given(
    wanted=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    concurrency=st.integers(0, 30),
    reach=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_requests_never_all_wait_below_their_thresholds(
    wanted: tuple[int, int], concurrency: int, reach: tuple[int, int]
) -> None:
    thresholds = Policies(wanted).at(concurrency, reach).thresholds
    assert sum(b - 1 for b in thresholds) < max(concurrency, 1)
    assert all(b <= max(1, count) for b, count in zip(thresholds, reach, strict=True))


class Nobody:
    """Listens to no sequence."""

    def committed(self, token: int) -> bool:
        return False

    def wake(self, sequence: Sequence) -> None:
        pass


def request(number: int, holder: int) -> Sequence:
    return Sequence(number, [5], SamplingParams(), 0, (), Limits(9, frozenset()), Nobody(), holder)


def recipe(**changes: Any) -> Any:
    rule = {"when": "entropy > 1", "send": "keep"}
    return load_recipe(
        {
            "name": "r",
            "entry": "a",
            "models": dict.fromkeys("abc", "owner/model"),
            "routes": {"a": [{**rule, "to": "b"}], "b": [{**rule, "to": "c"}]},
            **changes,
        }
    )


def test_a_request_that_has_gone_on_for_good_does_not_count() -> None:
    reach = Reach(recipe())
    assert not reach.fixed
    active = [request(1, 1), request(2, 2), request(3, 3), request(4, 3)]
    assert reach.counts(active) == (1, 2, 4)


def test_where_every_model_leads_to_every_other_all_requests_count() -> None:
    rule = {"when": "entropy > 1", "send": "keep"}
    around = {"a": [{**rule, "to": "b"}], "b": [{**rule, "to": "c"}], "c": [{**rule, "to": "a"}]}
    reach = Reach(recipe(routes=around))
    assert reach.fixed
    assert reach.counts([request(1, 1), request(2, 3)]) == (2, 2, 2)


@pytest.mark.parametrize(("written", "counts"), [(0, (1, 1, 1)), (2, (1, 1, 1)), (3, (1, 1, 0))])
def test_a_request_that_has_used_up_its_budget_does_not_count(written: int, counts: tuple[int, ...]) -> None:
    rule = {"when": "entropy > 1", "send": "keep"}
    around = {"a": [{**rule, "to": "b"}], "b": [{**rule, "to": "c"}], "c": [{**rule, "to": "a"}]}
    reach = Reach(recipe(routes=around, budgets={"c": {"max_tokens": 3}}))
    one = request(1, 1)
    one.written[3] = written
    assert reach.counts([one]) == counts
