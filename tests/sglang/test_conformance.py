"""The sglang engine honours the engine protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.conformance import EngineConformance, Make, close, feed, fill, tokens_of
from tests.engines.tiny import make_model
from tests.sglang.several import make_engine
from tokenflow.engines.base import Extend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class TestSglang(EngineConformance):
    @pytest.fixture
    def make(self, model: Path) -> Make:
        return lambda **config: make_engine(model, **config)


@pytest.mark.parametrize(
    ("counts", "mode"), [((3, 1), "DECODE"), ((16, 2), "DECODE"), ((17, 1), "EXTEND"), ((16, 16), "EXTEND")]
)
def test_a_few_tokens_for_each_request_are_one_decode(
    model: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int], mode: str
) -> None:
    """As many as there are rows, and 16 at most for each; the logits are those of one long extend."""
    engine = make_engine(model, kv_cache=1024, max_requests=24)
    sequences = [tokens_of(20 + count, seed) for seed, count in enumerate(counts)]
    expected = [feed(engine, tokens)[1][20:] for tokens in sequences]
    slots = [fill(engine, tokens[:20])[0] for tokens in sequences]
    runner, modes = engine._crew.runner, []
    forward = runner.forward

    def record(batch: Any) -> Any:
        modes.append(batch.forward_mode.name)
        return forward(batch)

    monkeypatch.setattr(runner, "forward", record)
    for wanted, rows in (("all", slice(None)), ("last", slice(-1, None))):
        output = engine.step(
            [Extend(slot, tokens[20:], wanted) for slot, tokens in zip(slots, sequences, strict=True)]  # type: ignore[arg-type]
        )
        close(output.logits, torch.cat([logits[rows] for logits in expected]))
        assert len(output.hidden) == len(output.logits)
        for slot in slots:
            engine.truncate(slot, 20)
    assert modes == [mode, mode]
