"""What is measured while serving becomes a model to plan with."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.actors.meter import Meter
from tokenflow.errors import PlanError


def filled(p: float = 0.35, rows: int = 1000, seed: int = 0) -> Meter:
    """Two models as in R2R, of which so many rows were seen at the small one."""
    meter, source = Meter(["slm", "llm"], 0), random.Random(seed)
    for _ in range(rows):
        away = source.random() < p
        meter.moved(0, int(away), int(not away))
        if away:
            meter.moved(1, 0, 1)
    for _ in range(20):
        meter.stepped(0, 3, 0.006)
        meter.stepped(1, 2, 0.0279)
    meter.fold()
    return meter


def test_the_model_has_the_shares_commits_and_latencies_that_were_seen() -> None:
    model = filled().model()
    assert model.routing[0][1] == pytest.approx(0.35, abs=0.04)
    assert model.routing[1] == (1, 0)
    assert model.commits == ((1, 0), (1, 0))
    assert [model.step_ms(i, 1) for i in (0, 1)] == pytest.approx([6.0, 27.9])
    assert model.quantum_ms == pytest.approx(0.1)


def test_without_enough_steps_it_says_what_is_missing() -> None:
    meter = Meter(["slm", "llm"], 0)
    assert meter.missing == ["where slm leads", "how long a step of slm takes"]
    with pytest.raises(PlanError, match="too few steps were measured to say where slm leads or how long"):
        meter.model()
    for _ in range(200):
        meter.moved(0, 1, 0)
        meter.stepped(0, 1, 0.006)
    meter.fold()
    assert meter.missing == ["where llm leads", "how long a step of llm takes"]


def test_a_model_that_nobody_comes_to_is_not_waited_for() -> None:
    meter = Meter(["slm", "llm", "spare"], 0)
    for _ in range(200):
        meter.moved(0, 1, 0)
        meter.moved(1, 0, 1)
        meter.stepped(0, 1, 0.006)
        meter.stepped(1, 1, 0.02)
    meter.fold()
    model = meter.model()
    assert model.routing[2] == (0, 0, 1)
    assert model.reachable() == (True, True, False)


def test_a_change_of_the_load_is_followed_within_a_few_thousand_rows() -> None:
    meter, source = filled(0.05, rows=20_000), random.Random(1)
    assert meter.model().routing[0][1] == pytest.approx(0.05, abs=0.02)
    for _ in range(10):
        for _ in range(400):
            away = source.random() < 0.5
            meter.moved(0, int(away), int(not away))
        meter.fold()
    assert meter.model().routing[0][1] == pytest.approx(0.5, abs=0.06)


def test_several_tokens_may_become_final_in_one_step() -> None:
    meter = filled()
    for _ in range(4000):
        meter.moved(0, 0, 3)
    meter.fold()
    assert meter.model().commits[0][0] == pytest.approx(3)


def test_latencies_that_hardly_differ_are_one_number() -> None:
    meter = filled()
    for batch in range(1, 9):
        for _ in range(20):
            meter.stepped(0, batch, 0.006 + 0.00001 * batch)
    table = meter.model().latency_ms[0]
    assert table.sizes == (1,)  # type: ignore[union-attr]


@given(
    latencies=st.dictionaries(st.integers(1, 16), st.floats(1, 50), min_size=1, max_size=8),
    batch=st.integers(1, 15),
)
def test_a_larger_batch_is_never_faster(latencies: dict[int, float], batch: int) -> None:
    meter = filled()
    for size, latency in latencies.items():
        for _ in range(30):
            meter.stepped(1, size, latency / 1e3)
    model = meter.model()
    assert model.step_ms(1, batch + 1) >= model.step_ms(1, batch)


def test_latencies_by_batch_size_are_kept_apart() -> None:
    meter = Meter(["slm", "llm"], 0)
    for _ in range(200):
        meter.moved(0, 1, 0)
        meter.moved(1, 0, 1)
        meter.stepped(1, 1, 0.02)
        for batch in (1, 4, 16):
            meter.stepped(0, batch, 0.005 + 0.001 * batch)
    meter.fold()
    model = meter.model()
    assert [model.step_ms(0, batch) for batch in (1, 4, 10, 16)] == pytest.approx([6, 9, 15, 21], abs=0.06)


def test_one_hiccup_does_not_count_for_more_than_a_few_steps() -> None:
    meter = filled()
    meter.stepped(0, 3, 5.0)
    assert meter.model().step_ms(0, 1) < 7


def test_steps_that_vary_are_planned_for_in_coarser_quanta() -> None:
    source = random.Random(1)
    quanta = []
    for jitter in (0.0, 0.03, 0.2):
        meter = Meter(["one"], 0)
        for _ in range(400):
            meter.moved(0, 0, 1)
            meter.stepped(0, 1, 0.006 * (1 + jitter * source.uniform(-2, 2)))
        meter.fold()
        assert meter.jitter == pytest.approx(jitter, rel=0.25)
        quanta.append(meter.model().quantum_ms)
    assert quanta == [pytest.approx(0.1), pytest.approx(0.18, rel=0.3), pytest.approx(0.4, rel=0.2)]
