"""The routing model: what it accepts, what it makes of latencies, and what it says of everything else."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from tests.planner.models import ensemble, r2r
from tokenflow.errors import PlanError, TokenflowError
from tokenflow.planner import Lookahead, RoutingModel, best_thresholds, throughput

GOOD: dict[str, Any] = {
    "routing": [[0.65, 0.35], [1, 0]],
    "commits": [[1, 0], [1, 0]],
    "latency_ms": [6.0, 27.9],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routing": [[0.65, 0.3], [1, 0]]}, "routing[0] must be probabilities that sum to 1"),
        ({"routing": [[1.2, -0.2], [1, 0]]}, "routing[0][1] must be a finite number of at least 0, got -0.2"),
        ({"routing": [[0.65, float("nan")], [1, 0]]}, "routing[0][1] must be a finite number"),
        ({"routing": [[0.65, 0.35]]}, "routing must be a square matrix, got shape (1, 2)"),
        ({"routing": [[0.65, 0.35], [1]]}, "routing must be a square matrix of numbers"),
        ({"routing": [["a", "b"], [1, 0]]}, "routing must be a square matrix of numbers"),
        ({"routing": []}, "routing must be a square matrix"),
        ({"commits": [[1]]}, "commits must be 2 x 2 like routing, got 1 x 1"),
        ({"commits": [[1, 0], [-1, 0]]}, "commits[1][0] must be a finite number of at least 0, got -1"),
        ({"latency_ms": [6.0]}, "latency_ms must list 2 latencies, one per model, got 1"),
        ({"latency_ms": 6.0}, "latency_ms must list one latency per model, got 6.0"),
        ({"latency_ms": {0: 6.0, 1: 27.9}}, "latency_ms must list one latency per model"),
        (
            {"latency_ms": [6.0, -27.9]},
            "latency_ms[1] at batch size 1 must be a number of milliseconds greater than 0, got -27.9",
        ),
        (
            {"latency_ms": [6.0, 0]},
            "latency_ms[1] at batch size 1 must be a number of milliseconds greater than 0",
        ),
        ({"latency_ms": [6.0, True]}, "latency_ms[1] must be a number, a table by batch size or a function"),
        (
            {"latency_ms": [6.0, "fast"]},
            "latency_ms[1] must be a number, a table by batch size or a function",
        ),
        ({"latency_ms": [6.0, []]}, "latency_ms[1] is an empty table"),
        ({"latency_ms": [6.0, {0: 20.0}]}, "latency_ms[1] has batch size 0"),
        (
            {"latency_ms": [6.0, [20.0, float("inf")]]},
            "latency_ms[1] at batch size 2 must be a number greater than 0",
        ),
        (
            {"latency_ms": [6.0, lambda batch: None]},
            "latency_ms[1] at batch size 1 must be a number of milliseconds",
        ),
        (
            {"latency_ms": [0.04, 27.9]},
            "latency_ms[0] at batch size 1 is 0.04 ms, less than half of quantum_ms = 0.1",
        ),
        ({"latency_ms": [1e300, 27.9]}, "latency_ms[0] at batch size 1 is 1e+300 ms, more than 1e+09 times"),
        ({"latency_ms": [float("nan"), 1]}, "latency_ms[0] must be a finite number of milliseconds, got nan"),
        ({"batch_limits": 3}, "batch_limits must list one entry per model, got 3"),
        ({"run_lengths": [3, None]}, "run_lengths[0] must be weights by number of steps or None, got 3"),
        ({"run_lengths": [[3, 4], None]}, "run_lengths[0] must be weights by number of steps or None"),
        ({"quantum_ms": 1e-320}, "more than 1e+09 times quantum_ms"),
        ({"quantum_ms": 0}, "quantum_ms must be a number greater than 0, got 0"),
        ({"quantum_ms": "0.1"}, "quantum_ms must be a number greater than 0, got '0.1'"),
        ({"batch_limits": [1]}, "batch_limits must list 2 limits, one per model, got 1"),
        ({"batch_limits": [0, None]}, "batch_limits[0] must be an integer of at least 1 or None, got 0"),
        ({"batch_limits": [2.5, None]}, "batch_limits[0] must be an integer of at least 1 or None, got 2.5"),
        ({"entry": 2}, "entry must be the index of a model, 0 to 1, got 2"),
        ({"entry": True}, "entry must be the index of a model"),
        ({"jitter": -0.1}, "jitter must be a number of at least 0, got -0.1"),
        ({"jitter": float("nan")}, "jitter must be a number of at least 0"),
        ({"run_lengths": [{1: 1.0}]}, "run_lengths must list 2 distributions, one per model, got 1"),
        ({"run_lengths": [{0: 1.0}, None]}, "run_lengths[0] has length 0; a run is an integer of at least 1"),
        ({"run_lengths": [{2: -1.0}, None]}, "run_lengths[0] gives length 2 the weight -1.0"),
        ({"run_lengths": [{2: 0.0}, None]}, "run_lengths[0] has no length of positive weight"),
        (
            {"routing": [[1, 0], [1, 0]], "run_lengths": [{2: 1.0}, None]},
            "run_lengths[0] is given, but routing[0] never leaves the model",
        ),
    ],
)
def test_an_impossible_model_is_refused_with_the_entry_that_is_wrong(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        RoutingModel(**GOOD | change)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("thresholds", "concurrency", "message"),
    [
        ((1, 1), 0, "concurrency must be an integer from 1 to 1,024, got 0"),
        ((1, 1), 10**20, "concurrency must be an integer from 1 to 1,024, got 1000000000"),
        (2, 2, "thresholds must list one entry per model, got 2"),
        ((1, 1), 2.0, "concurrency must be an integer from 1 to 1,024, got 2.0"),
        ((1, 1), True, "concurrency must be an integer from 1 to 1,024, got True"),
        ((1,), 2, "thresholds must list 2 integers, one per model, got (1,)"),
        ((1, 0), 2, "thresholds[1] must be an integer of at least 1, got 0"),
        ((1, 1.5), 2, "thresholds[1] must be an integer of at least 1, got 1.5"),
        ((2, 2), 2, "thresholds (2, 2) can deadlock at concurrency 2: sum(B_i - 1) = 2"),
        ((1, 3), 8, "thresholds[1] = 3 is above the batch limit 2 of model 1"),
    ],
)
def test_an_impossible_question_is_refused(thresholds: Any, concurrency: Any, message: str) -> None:
    model = replace(r2r(), batch_limits=[None, 2])
    with pytest.raises(PlanError) as caught:
        throughput(model, thresholds, concurrency)
    assert message in str(caught.value)
    with pytest.raises(PlanError):
        Lookahead.of(model, concurrency, thresholds)


def test_a_search_for_no_requests_is_refused() -> None:
    with pytest.raises(PlanError, match="concurrency must be an integer from 1 to 1,024"):
        best_thresholds(r2r(), 0)


def test_a_plan_error_is_a_value_error_of_the_tree() -> None:
    assert issubclass(PlanError, TokenflowError)
    assert issubclass(PlanError, ValueError)


def test_a_latency_may_be_a_number_a_table_measured_points_or_a_function() -> None:
    model = RoutingModel(
        np.full((4, 4), 0.25),
        np.ones((4, 4)),
        [6, [6.0, 6.5, 8.0], {2: 10.0, 6: 14.0}, lambda batch: 3.0 * batch],
    )
    assert [model.ticks(0, b) for b in (1, 9)] == [60, 60]
    assert [model.ticks(1, b) for b in (1, 2, 3, 9)] == [60, 65, 80, 80]
    assert [model.ticks(2, b) for b in (1, 2, 4, 6, 9)] == [100, 100, 120, 140, 140]
    assert [model.ticks(3, b) for b in (1, 5)] == [30, 150]


def test_latencies_are_rounded_to_the_nearest_quantum() -> None:
    model = RoutingModel([[1]], [[1]], [0.97], quantum_ms=0.25)
    assert model.ticks(0, 1) == 4
    assert model.step_ms(0, 1) == 1.0


def test_a_model_is_frozen_and_compares_by_value() -> None:
    assert r2r() == r2r()
    assert hash(r2r()) == hash(r2r())
    assert r2r() != r2r(p=0.2)
    with pytest.raises(FrozenInstanceError):
        r2r().entry = 1  # type: ignore[misc]


def test_reachable_models_are_those_that_the_entry_leads_to() -> None:
    chain = RoutingModel([[0.5, 0.5, 0], [0, 1, 0], [0.5, 0, 0.5]], [[1] * 3] * 3, [1, 1, 1])
    assert chain.reachable() == (True, True, False)
    assert replace(chain, entry=2).reachable() == (True, True, True)
    assert ensemble(6, 12, 27).reachable() == (True, True, True)


def test_run_lengths_set_the_staying_probability_to_their_mean() -> None:
    model = RoutingModel(
        [[0.2, 0.6, 0.2], [1, 0, 0], [1, 0, 0]],
        [[1, 0, 0]] * 3,
        [1] * 3,
        run_lengths=[{2: 1, 6: 1}, None, None],
    )
    assert model.routing[0] == pytest.approx((0.75, 0.25 * 0.75, 0.25 * 0.25))
    assert not model.is_markov
    assert replace(model, entry=1).run_lengths == model.run_lengths
    assert replace(model, run_lengths=None).is_markov
