"""The sglang engine honours the engine protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conformance import EngineConformance, Make
from tests.engines.tiny import make_model
from tests.sglang.several import make_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class TestSglang(EngineConformance):
    @pytest.fixture
    def make(self, model: Path) -> Make:
        return lambda **config: make_engine(model, **config)
