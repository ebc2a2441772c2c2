"""Both engines honour the engine protocol on a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.conformance import EngineConformance, Make
from tests.engines.tiny import make_model
from tokenflow.engines.torch import TorchEngine
from tokenflow.types import ModelConfig


class TestTorch(EngineConformance):
    @pytest.fixture
    def make(self, model: Path, device: str) -> Make:
        return lambda **config: TorchEngine(ModelConfig(path=str(model), device=device, **config))  # type: ignore[arg-type]

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
class TestSglang(EngineConformance):
    """In bfloat16 and with heads of 64 channels: SGLang's CUDA kernels have no float32 and no small heads."""

    @pytest.fixture
    def make(self, model: Path, device: str) -> Make:
        from tests.sglang.several import make_engine

        return lambda **config: make_engine(model, device=device, dtype="bfloat16", **config)

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_model(tmp_path_factory.mktemp("model"), head_dim=64)

    @pytest.fixture(autouse=True)
    def tolerance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.engines.conformance.TOLERANCE", 0.06)
