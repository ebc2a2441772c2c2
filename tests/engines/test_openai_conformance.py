"""The openai engine does with slots what every engine must do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.endpoint import Endpoint
from tests.engines.conformance import Make, SlotConformance
from tests.recipes import DEMO
from tokenflow.engines.openai import OpenAIEngine
from tokenflow.types import EndpointConfig, ModelConfig


class TestOpenAI(SlotConformance):
    @pytest.fixture
    def make(self) -> Iterator[Make]:
        with Endpoint() as endpoint:
            made: list[OpenAIEngine] = []

            def build(**config: object) -> OpenAIEngine:
                remote = EndpointConfig(base_url=endpoint.url, span=1)
                settings = ModelConfig(path=str(DEMO / "small"), endpoint=remote, **config)  # type: ignore[arg-type]
                made.append(OpenAIEngine(settings))
                return made[-1]

            yield build
            for engine in made:
                engine.close()
