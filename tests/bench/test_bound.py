"""The bound: steps that take as long as their forward passes, and nothing else."""

from __future__ import annotations

import pytest

from bench.compare.bound import Step, StepTimes, simulate
from bench.compare.work import Request


class Constant(StepTimes):
    """Every step of a model takes its own time."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = seconds
        self.steps: list[tuple[int, int, int]] = []

    def __call__(self, model: int, computed: int, context: int) -> float:
        self.steps.append((model, computed, context))
        return self._seconds[model]


def test_the_times_of_steps_are_found_again() -> None:
    def forward(model: int, computed: int, context: int) -> float:
        return 0.001 * (1 + model) + 2e-4 * computed + 1e-6 * context

    steps = [
        Step(model, computed, context, forward_s := forward(model, computed, context), forward_s + 3e-4)
        for model in (0, 1)
        for computed in (1, 2, 7)
        for context in (100, 300, 900)
    ]
    steps += [Step(0, 500, 500, 0.5, 0.6), Step(0, 1000, 1000, 1.0, 1.2)]
    passes, whole = StepTimes(steps, whole=False), StepTimes(steps, whole=True)
    assert passes(0, 4, 200) == pytest.approx(0.001 + 8e-4 + 2e-4)
    assert passes(1, 1, 100) == pytest.approx(0.002 + 2e-4 + 1e-4)
    assert whole(1, 1, 100) == pytest.approx(0.002 + 2e-4 + 1e-4 + 3e-4)
    assert passes(0, 750, 750) == pytest.approx(0.75)
    assert whole(0, 750, 750) == pytest.approx(0.9)


def test_a_dropped_token_costs_a_step_and_the_other_model_reads_what_it_has_not_seen() -> None:
    times = Constant(1.0, 10.0)
    assert simulate([Request(5, "AaBA")], 1, times) == (1 + 1 + 10 + 1, 3)
    assert times.steps == [(0, 5, 5), (0, 1, 6), (1, 6, 6), (0, 1, 7)]


def test_models_run_side_by_side_and_take_all_that_wait() -> None:
    times = Constant(1.0, 10.0)
    assert simulate([Request(1, "ABA"), Request(1, "AAAAAAAAAAA")], 2, times) == (12, 14)
    assert times.steps[0] == (0, 2, 2)
    assert simulate([Request(1, "AB"), Request(1, "AB")], 2, times) == (11, 4)


def test_the_next_request_starts_when_one_ends() -> None:
    assert simulate([Request(3, "AA"), Request(3, "AA"), Request(3, "A")], 2, Constant(1.0)) == (3, 5)


def test_long_prompts_are_read_in_parts() -> None:
    times = Constant(1.0)
    assert simulate([Request(3000, "A"), Request(1, "AA")], 2, times) == (2, 3)
    assert [computed for _, computed, _ in times.steps] == [2048, 954]


def test_what_would_take_longer_than_a_cut_run_is_cut_too() -> None:
    requests = [Request(1, "AAAAA"), Request(1, "AB")]
    assert simulate(requests, 2, Constant(1.0, 10.0), limit_s=4.5) == (4.5, 5)
