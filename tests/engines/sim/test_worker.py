"""A simulated worker takes as long as it is told, and is held to the conversation like any other."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.conformance import WorkerConformance, opened, run
from tokenflow.engines.sim.worker import SimWorker, step_ms
from tokenflow.errors import ProtocolError
from tokenflow.planner.model import LatencyTable
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import VERSION, Destination, Hello, Row, RowDone, Score

TO_LLM = Destination(2, "llm", 0.35, -1, 0, False)


def hello(**config: Any) -> Hello:
    config = {"engine": "sim", "latency_ms": ((1, 3.0),), **config}
    return Hello(
        VERSION, "slm", 1, ModelConfig(**config), (), (), 257, (256,), models=2, destinations=(TO_LLM,)
    )


def test_the_whole_latency_passes_after_a_frame_was_decoded() -> None:
    worker = SimWorker(hello(latency_ms=((1, 4.0), (2, 20.0))))
    began = time.monotonic()
    one = run(worker, Row(1, 0, 0, [1, 2, 3], 0), opens=[opened()])
    assert time.monotonic() - began >= 0.004
    assert one.ended - one.started == pytest.approx(0.004)
    two = run(worker, Row(1, 0, 3, [4], 1), Row(2, 0, 0, [1, 2, 3], 0), opens=[opened(2)])
    assert time.monotonic() >= two.ended
    assert two.ended - two.started == pytest.approx(two.forward_s) == pytest.approx(0.020)
    assert (one.computed, two.computed) == (3, 4)


class TestSim(WorkerConformance):
    @pytest.fixture
    def worker(self) -> SimWorker:
        return SimWorker(hello(latency_ms=((1, 0.01),)))


def test_a_step_without_rows_takes_no_time() -> None:
    assert run(SimWorker(hello()), opens=[opened()]).forward_s == 0


def test_what_a_request_gets_depends_on_its_seed_and_position_only() -> None:
    def answers(seed: int, company: int) -> list[RowDone]:
        worker = SimWorker(hello(latency_ms=((1, 0.01),)))
        others = range(2, 2 + company)
        opens = [opened(1, seed), *(opened(other, other) for other in others)]
        run(worker, *(Row(open.handle, 0, 0, [1, 2, 3], 0) for open in reversed(opens)), opens=opens)
        found = []
        for position in range(3, 40):
            done = run(worker, *(Row(handle, 0, position, [5], 0) for handle in (*others, 1)))
            found += [row for row in done.rows if row.handle == 1]
        return found

    assert answers(7, company=0) == answers(7, company=3) != answers(8, company=0)


def test_shares_are_met_and_say_which_rule_fired() -> None:
    worker = SimWorker(hello(latency_ms=((1, 0.01),)))
    opens = [opened(handle, seed=handle) for handle in range(1, 2001)]
    rows = run(worker, *(Row(open.handle, 0, 0, [1, 2, 3], 0) for open in opens), opens=opens).rows
    away = [row for row in rows if row.destination]
    assert {(row.rule, row.destination) for row in away} == {(0, 2)}
    assert {row.rule for row in rows} == {0, -1}
    assert len(away) / len(rows) == pytest.approx(0.35, abs=0.04)
    assert all(ord("a") <= row.token <= ord("z") for row in rows)


def test_nothing_is_scored() -> None:
    with pytest.raises(ProtocolError, match="cannot answer Score"):
        SimWorker(hello()).answer(Score(1, [1, 2], 0))


def test_the_handshake_says_that_it_is_simulated() -> None:
    ready = SimWorker(hello(context_length=100, max_requests=3)).ready(0.5)
    assert (ready.device, ready.context_length, ready.max_requests) == ("simulated", 100, 3)
    assert ready.vocab_size == 257
    assert ready.kv_capacity >= 300


@given(
    table=st.dictionaries(st.integers(1, 64), st.floats(0.1, 100), min_size=1, max_size=5),
    batch=st.integers(1, 80),
)
def test_latencies_are_those_that_the_planner_uses(table: dict[int, float], batch: int) -> None:
    sizes = tuple(sorted(table))
    planned = LatencyTable(sizes, tuple(table[size] for size in sizes))(batch)
    assert step_ms(tuple(sorted(table.items())), batch) == pytest.approx(planned)
