"""A worker that runs a model is held to the conversation with its router."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import ENGINE
from tests.worker.conformance import WorkerConformance
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import VERSION, Hello
from tokenflow.worker.model import ModelWorker


class TestModel(WorkerConformance):
    @pytest.fixture
    def worker(self, tmp_path: Path) -> ModelWorker:
        (tmp_path / "toy.json").write_text("{}")
        return ModelWorker(
            Hello(VERSION, "slm", 1, ModelConfig(path=str(tmp_path), engine=ENGINE), (), (), 128, (2,))
        )
