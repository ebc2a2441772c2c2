"""What SGLang would load without a word, or refuse with many, is refused in one line; it draws nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.tiny import edit_config, make_model
from tests.sglang.several import make_engine
from tokenflow.errors import ModelLoadError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 64}, "tensors do not fit config.json: 6 of another shape"),
        ({"architectures": ["NopeForCausalLM"]}, "NopeForCausalLM is not supported by SGLang 0.5.23"),
        ({"eos_token_id": "x"}, "Validation error for field 'eos_token_id': TypeError"),
        ({"model_type": "nope"}, "has model type `nope`"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_one_line(model: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(model, **changes)
    with pytest.raises(ModelLoadError) as refused:
        make_engine(model, kv_cache=256, max_requests=2)
    assert message in str(refused.value)
    assert str(model) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rope", "known"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, 512),
    ],
    ids=str,
)
def test_a_context_is_at_most_what_the_model_knows(
    model: Path, rope: dict[str, Any] | None, known: int
) -> None:
    edit_config(model, max_position_embeddings=256, rope_parameters=rope)
    settings = {"kv_cache": 256, "max_requests": 2}
    with pytest.raises(ModelLoadError) as refused:
        make_engine(model, context_length=known + 1, **settings)
    assert str(refused.value) == (
        f"{model / 'config.json'}: context_length {known + 1} is more than the model's {known} positions; "
        "lower it, or raise max_position_embeddings if the model knows more"
    )
    assert make_engine(model, context_length=known, **settings).info.context_length == known


def test_loading_draws_no_progress_bars(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    make_engine(model, kv_cache=256, max_requests=2)
    assert "it/s" not in capfd.readouterr().err
