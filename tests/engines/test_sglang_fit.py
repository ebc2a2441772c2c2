"""A checkpoint is compared with its config.json before SGLang, which would take anything, loads it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engines.tiny import edit_config, make_model
from tokenflow.engines.sglang.fit import check_fit
from tokenflow.errors import ModelLoadError, UnsupportedModel

GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def change(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the only weight file; ``None`` removes one."""
    file = path / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(file) | changes).items() if tensor is not None}
    save_file(tensors, file)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_checkpoint_fits(tmp_path: Path, family: str, tied: bool) -> None:
    check_fit(make_model(tmp_path, family, tie_word_embeddings=tied, shard="8KB"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tied_head_that_is_stored_and_old_buffers_are_let_through(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    path = make_model(tmp_path, tie_word_embeddings=True)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path / "model.safetensors").items()}
    head = tensors["model.embed_tokens.weight"].clone()
    buffers = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    change(path, **tensors, **buffers)
    check_fit(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 32}, f"{GATE} in model.safetensors is [48, 32] and should be [32, 32]"),
        ({"intermediate_size": 64}, f"{GATE} in model.safetensors is [48, 32] and should be [64, 32]"),
        ({"num_key_value_heads": 1}, "k_proj.weight in model.safetensors is [32, 32] and should be [16, 32]"),
        ({"vocab_size": 80}, "lm_head.weight in model.safetensors is [96, 32] and should be [80, 32]"),
        ({"attention_bias": True}, "8 missing: model.layers.0.self_attn.q_proj.bias"),
        ({"num_hidden_layers": 3, "layer_types": None}, "11 missing: model.layers.2."),
        ({"num_hidden_layers": 1, "layer_types": None}, "11 not used by the model: model.layers.1"),
    ],
    ids=str,
)
def test_a_config_of_another_model_is_refused(model: Path, changes: dict[str, Any], message: str) -> None:
    """SGLang loads all of these but the vocabulary's, and answers with nonsense."""
    edit_config(model, **changes)
    with pytest.raises(ModelLoadError) as refused:
        check_fit(model)
    assert str(refused.value).startswith(f"{model}: tensors do not fit config.json: ")
    assert message in str(refused.value)


def test_what_is_missing_or_left_over_is_refused(model: Path) -> None:
    change(model, **{"model.norm.weight": None, "model.norm.bias": torch.zeros(32)})
    with pytest.raises(
        ModelLoadError, match=r"1 missing: model\.norm\.weight; 1 not used .*: model\.norm\.bias"
    ):
        check_fit(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive integer, got 'two'"),
        ({"intermediate_size": -3}, "intermediate_size must be a positive integer, got -3"),
        (
            {"architectures": "Qwen3ForCausalLM"},
            "architectures must be a list of names, got 'Qwen3ForCausalLM'",
        ),
        ({"architectures": None}, 'names no architecture; it should, as in ["Qwen3ForCausalLM"]'),
        ({"text_config": 3}, "text_config must be an object, got 3"),
    ],
    ids=str,
)
def test_an_odd_config_is_told_in_one_line(model: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(model, **changes)
    with pytest.raises((ModelLoadError, UnsupportedModel)) as refused:
        check_fit(model)
    assert str(refused.value) == f"{model}/config.json: {message}"


def test_experts_that_are_stored_apart_are_known(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    check_fit(tmp_path)
    edit_config(tmp_path, moe_intermediate_size=24)
    with pytest.raises(
        ModelLoadError, match=r"experts\.0\.down_proj\.weight in .* is \[32, 16\] and should be"
    ):
        check_fit(tmp_path)


def packed(path: Path) -> None:
    """Quantise the matrices of the layers as AWQ does: other tensors, of other shapes, for each."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        tensors[f"{module}.qweight"] = torch.zeros(columns, rows // 8, dtype=torch.int32)
        tensors[f"{module}.scales"] = torch.zeros(columns // 16, rows, dtype=torch.float16)
    save_file(tensors, path / "model.safetensors")
    edit_config(path, quantization_config={"quant_method": "awq", "bits": 4})


def test_a_quantised_checkpoint_has_tensors_of_its_own(model: Path) -> None:
    """Its modules must be there all the same, and what is stored whole must fit."""
    packed(model)
    check_fit(model)
    edit_config(model, vocab_size=80)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight in .* should be \[80, 32\]"):
        check_fit(model)
    edit_config(model, vocab_size=96, num_hidden_layers=3, layer_types=None)
    with pytest.raises(ModelLoadError, match=r"11 missing: model\.layers\.2"):
        check_fit(model)


def test_eight_bit_floats_are_stored_whole(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.zeros(1, 1)
    save_file(tensors, model / "model.safetensors")
    edit_config(model, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    check_fit(model)
    edit_config(model, intermediate_size=64)
    with pytest.raises(
        ModelLoadError, match=r"gate_proj\.weight in .* is \[48, 32\] and should be \[64, 32\]"
    ):
        check_fit(model)


def test_a_model_that_transformers_does_not_know_is_not_compared_and_that_is_said(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(model, architectures=["SomethingOfTomorrowForCausalLM"], intermediate_size=64)
    with caplog.at_level(logging.WARNING, "tokenflow"):
        check_fit(model)
    assert "the tensors of SomethingOfTomorrowForCausalLM are not compared with config.json" in caplog.text
