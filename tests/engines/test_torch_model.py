"""The forward pass computes what transformers computes, for every family and option."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.tiny import (
    CONTEXT,
    VOCAB,
    edit_config,
    make_model,
    reference_logits,
    reference_model,
    some_tokens,
)
from tokenflow.engines.base import Extend
from tokenflow.engines.torch import TorchEngine
from tokenflow.types import ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LENGTH = 150


def engine_logits(path: Path, tokens: list[int], paged: bool = False, **config: Any) -> Tensor:
    engine = TorchEngine(ModelConfig(path=str(path), **config), paged=paged)
    slot, _ = engine.open(tokens)
    return engine.step([Extend(slot, tokens, "all")]).logits


def assert_equal_to_transformers(path: Path) -> None:
    """Compared in float32 with the float64 result, which tells rounding from error."""
    tokens = some_tokens(LENGTH)
    exact = reference_logits(reference_model(path, torch.float64), tokens)
    for paged in (False, True):
        error = (engine_logits(path, tokens, paged) - exact).abs().max()
        assert error <= 3e-6 * exact.abs().max(), f"off by {error} of {exact.abs().max()}"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_family_gives_the_logits_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    assert_equal_to_transformers(make_model(tmp_path, family, tie_word_embeddings=tied))


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_stretched_positions_are_those_of_transformers(
    tmp_path: Path, family: str, rope: dict[str, Any]
) -> None:
    assert_equal_to_transformers(make_model(tmp_path, family, rope_parameters=dict(rope)))


@pytest.mark.parametrize(
    "options",
    [
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"attention_factor": 0.7},
        {"truncate": False},
        {"mscale": 1.3, "mscale_all_dim": 0.8},
        {"factor": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_yarn_options_are_those_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_equal_to_transformers(make_model(tmp_path, rope_parameters=YARN | options))


@pytest.mark.parametrize("rope", [LLAMA3, YARN, {"rope_theta": 77.0}], ids=["llama3", "yarn", "default"])
def test_both_forms_of_the_rope_settings_mean_the_same(tmp_path: Path, rope: dict[str, Any]) -> None:
    path = make_model(tmp_path / "new", rope_parameters=dict(rope))
    old = shutil.copytree(path, tmp_path / "old")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} or None
    edit_config(old, ("rope_parameters",), rope_theta=rope["rope_theta"], rope_scaling=scaling)
    older = shutil.copytree(old, tmp_path / "older")
    if scaling:
        kind = scaling.pop("rope_type")
        edit_config(older, rope_scaling={"type": kind, **scaling})
    tokens = some_tokens(LENGTH)
    expected = engine_logits(path, tokens)
    assert torch.equal(engine_logits(old, tokens), expected)
    assert torch.equal(engine_logits(older, tokens), expected)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("qwen3", {"num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 20}),
        ("llama", {"head_dim": 24}),
        ("qwen2", {"rms_norm_eps": 0.5}),
        ("qwen3", {"num_hidden_layers": 1}),
    ],
    ids=str,
)
def test_options_of_the_config_are_honoured(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    assert_equal_to_transformers(make_model(tmp_path, family, **settings))


def test_a_sharded_checkpoint_gives_the_logits_of_a_whole_one(tmp_path: Path) -> None:
    whole, sharded = make_model(tmp_path / "whole"), make_model(tmp_path / "sharded", shard="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    tokens = some_tokens(20)
    assert torch.equal(engine_logits(sharded, tokens), engine_logits(whole, tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_as_close_as_transformers_does(tmp_path: Path, dtype: str) -> None:
    path = make_model(tmp_path)
    tokens = some_tokens(LENGTH)
    exact = reference_logits(reference_model(path, torch.float64), tokens)
    half = engine_logits(path, tokens, dtype=dtype)
    assert half.dtype == getattr(torch, dtype)
    error = (half - exact).abs().mean()
    usual = (reference_logits(reference_model(path, getattr(torch, dtype)), tokens) - exact).abs().mean()
    assert error <= 1.2 * usual
    decoded = TorchEngine(ModelConfig(path=str(path), dtype=dtype))
    slot, _ = decoded.open(tokens)
    steps = torch.cat([decoded.step([Extend(slot, [token])]).logits for token in tokens])
    assert (steps - exact).abs().mean() <= 1.2 * usual


def test_auto_computes_in_the_type_of_the_stored_weights(tmp_path: Path) -> None:
    path = make_model(tmp_path / "wide")
    reference_model(path, torch.bfloat16).save_pretrained(tmp_path / "half")
    assert TorchEngine(ModelConfig(path=str(path))).info.dtype == "float32"
    assert TorchEngine(ModelConfig(path=str(tmp_path / "half"))).info.dtype == "bfloat16"
    assert TorchEngine(ModelConfig(path=str(tmp_path / "half"), dtype="float32")).info.dtype == "float32"


def test_hidden_states_are_the_input_of_the_lm_head(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    model = reference_model(path)
    engine = TorchEngine(ModelConfig(path=str(path)))
    tokens = some_tokens(12)
    slot, _ = engine.open(tokens)
    output = engine.step([Extend(slot, tokens)])
    with torch.inference_mode():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, -1:]
    torch.testing.assert_close(output.hidden, hidden, atol=1e-5, rtol=1e-5)


def test_scores_are_those_of_transformers_over_several_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow.engines.torch.engine._SCORE_CHUNK", 40)
    monkeypatch.setattr("tokenflow.engines.torch.engine._SCORE_LOGITS", 7 * VOCAB)
    path = make_model(tmp_path)
    tokens = some_tokens(101)
    logprobs = reference_logits(reference_model(path), tokens)[:-1].log_softmax(-1)
    scores = TorchEngine(ModelConfig(path=str(path))).score(tokens, top=3)
    expected = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs, expected, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(scores.top_logprobs, logprobs.topk(3).values, atol=3e-5, rtol=1e-5)
    assert scores.top_ids.shape == (100, 3)


def test_the_end_of_sequence_ids_of_both_configs_are_joined(tmp_path: Path) -> None:
    path = make_model(tmp_path, eos_token_id=5)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert TorchEngine(ModelConfig(path=str(path))).info.eos_token_ids == (7, 5)
    (path / "generation_config.json").unlink()
    assert TorchEngine(ModelConfig(path=str(path))).info.eos_token_ids == (5,)
    edit_config(path, eos_token_id=None)
    assert TorchEngine(ModelConfig(path=str(path))).info.eos_token_ids == ()


def test_the_context_is_the_models_unless_the_config_says_less(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    assert TorchEngine(ModelConfig(path=str(path))).info.context_length == CONTEXT
    assert TorchEngine(ModelConfig(path=str(path), context_length=64)).info.context_length == 64


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    rope = YARN | {"original_max_position_embeddings": CONTEXT}
    path = make_model(tmp_path, rope_parameters=rope)
    assert TorchEngine(ModelConfig(path=str(path))).info.context_length == 4 * CONTEXT
