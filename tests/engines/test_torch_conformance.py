"""The torch engine honours the engine protocol with either layout of its KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conformance import EngineConformance, Make
from tests.engines.tiny import make_model
from tokenflow.engines.base import Engine
from tokenflow.engines.torch import TorchEngine
from tokenflow.types import ModelConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class TestRows(EngineConformance):
    @pytest.fixture
    def make(self, model: Path) -> Make:
        def build(**config: object) -> Engine:
            return TorchEngine(ModelConfig(path=str(model), **config), paged=False)  # type: ignore[arg-type]

        return build


class TestPages(EngineConformance):
    @pytest.fixture(params=[4, 16], ids=lambda size: f"block{size}")
    def make(self, model: Path, request: pytest.FixtureRequest) -> Make:
        def build(**config: object) -> Engine:
            settings = ModelConfig(path=str(model), **config)  # type: ignore[arg-type]
            return TorchEngine(settings, paged=True, block_size=request.param)

        return build
