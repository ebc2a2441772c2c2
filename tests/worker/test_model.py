"""A worker that runs a model is held to the conversation with its router, and gathers nothing on the way."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from tests.recipes import ENGINE
from tests.worker.conformance import PROMPT, WorkerConformance, opened, prompt, run
from tokenflow.dsl.expr import parse_condition
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import VERSION, Hello, RouteRule, Row
from tokenflow.worker.model import ModelWorker

DEMO = Path(__file__).parents[2] / "recipes" / "demo" / "small"
ROWS = 7
LENGTH = 10


class TestModel(WorkerConformance):
    @pytest.fixture
    def worker(self, tmp_path: Path) -> ModelWorker:
        (tmp_path / "toy.json").write_text("{}")
        return ModelWorker(
            Hello(VERSION, "slm", 1, ModelConfig(path=str(tmp_path), engine=ENGINE), (), (), 128, (2,))
        )


@pytest.fixture
def small() -> ModelWorker:
    """A trained model, with a rule to evaluate at every token."""
    rules = (RouteRule(parse_condition("entropy > 0.5", ()), 2),)
    config = ModelConfig(path=str(DEMO), dtype="float32", device="cpu", kv_cache=1000, max_requests=ROWS)
    return ModelWorker(Hello(VERSION, "slm", 1, config, rules, (), 128, (2,), models=2))


def answer(worker: ModelWorker, first: int) -> None:
    """Open requests from this handle on, write some tokens to each, drop them."""
    handles = range(first, first + ROWS)
    rows = [prompt(handle) for handle in handles]
    opens = [opened(handle) for handle in handles]
    for position in range(LENGTH):
        done = run(worker, *rows, opens=opens)
        base = len(PROMPT) + position
        rows, opens = [Row(row.handle, 0, base, [row.token], position) for row in done.rows], []
    run(worker, drop=[*handles])


def test_a_step_leaves_nothing_behind_in_the_worker(small: ModelWorker) -> None:
    """Neither cycles nor entries of free lists: both would grow from step to step until a collection."""
    gc.collect()
    gc.disable()
    try:
        for number in range(10):
            answer(small, number * ROWS)
        before = sys.getallocatedblocks()
        for number in range(10, 60):
            answer(small, number * ROWS)
        held = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    assert held < 50 * LENGTH / 2, f"{held} blocks of memory after {50 * LENGTH} steps"
