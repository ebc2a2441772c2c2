"""Engines are chosen by name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.engines.tiny import make_model
from tokenflow.engines.load import load_engine
from tokenflow.engines.torch import TorchEngine
from tokenflow.errors import ModelLoadError, UnsupportedModel
from tokenflow.types import ModelConfig


def test_the_torch_engine_is_loaded_by_its_name(tmp_path: Path) -> None:
    engine = load_engine(ModelConfig(path=str(make_model(tmp_path)), device="cpu"))
    assert isinstance(engine, TorchEngine)
    assert (engine.info.device, engine.info.block_size) == ("cpu", 1)
    engine.close()


def test_an_unknown_engine_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"engine 'trochh' does not exist; engines: .*\btorch\b"):
        load_engine(ModelConfig(path=str(tmp_path), engine="trochh"))


def test_tensor_parallelism_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_model(tmp_path)
    with caplog.at_level(logging.WARNING, "tokenflow"):
        load_engine(ModelConfig(path=str(path), tensor_parallel=2))
    assert "tensor_parallel=2 is ignored: the torch engine runs" in caplog.text


def test_sglang_that_is_not_installed_is_asked_for_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        load_engine(ModelConfig(path=str(tmp_path), engine="sglang"))
    assert str(refused.value) == "engine 'sglang' needs SGLang 0.5.23: pip install 'tokenflow[sglang]'"


def test_an_endpoint_is_needed_where_it_is_meant(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"engine 'openai' needs endpoint\.base_url"):
        load_engine(ModelConfig(path=str(tmp_path), engine="openai"))
