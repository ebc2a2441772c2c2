"""What cannot be loaded is refused with an error that says what, where and what is possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engines.tiny import CONTEXT, edit_config, make_model
from tokenflow.engines.torch import TorchEngine
from tokenflow.errors import ModelLoadError, ModelNotFound, UnsupportedModel
from tokenflow.types import ModelConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def load(path: Path, **config: Any) -> TorchEngine:
    return TorchEngine(ModelConfig(path=str(path), **config))


def change_tensors(path: Path, **changes: Any) -> None:
    """Replace tensors of the only weight file; ``None`` removes one."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)


def test_a_directory_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"nowhere: no such directory"):
        load(tmp_path / "nowhere")


def test_a_directory_without_a_config_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json: not found"):
        load(model)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_broken_config_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json: (cannot be read|must hold)"):
        load(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel"),
        ({"architectures": None}, "architecture not named in the config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "a quantised checkpoint"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope type 'default'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": None},
            "a sliding window of 64",
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "a sliding window of 64",
        ),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_with_what_is(
    model: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(model, **changes)
    with pytest.raises(
        UnsupportedModel, match=rf"config\.json: {message}.* is not supported.*; supported: .+"
    ):
        load(model)


def test_an_unknown_architecture_is_answered_with_the_known_ones(model: Path) -> None:
    edit_config(model, architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        load(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": CONTEXT},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2, "layer_types": None},
    ],
    ids=str,
)
def test_a_sliding_window_that_changes_nothing_is_let_through(model: Path, changes: dict[str, Any]) -> None:
    edit_config(model, **changes)
    assert load(model).info.context_length == CONTEXT


def test_a_context_within_the_sliding_window_is_let_through(model: Path) -> None:
    edit_config(model, use_sliding_window=True, sliding_window=64, max_window_layers=0, layer_types=None)
    assert load(model, context_length=64).info.context_length == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"num_key_value_heads": 3}, "4 query heads over 3 key-value heads"),
        ({"head_dim": 15}, "the width must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "factor must be a positive number"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            "low_freq_factor 4.0 must be below",
        ),
    ],
    ids=str,
)
def test_a_config_that_contradicts_itself_is_refused(
    model: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(model, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(model)


def test_a_context_longer_than_the_model_knows_is_refused(model: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"context_length 300 is more than the model's {CONTEXT}"):
        load(model, context_length=300)


def test_missing_extra_and_misshapen_tensors_are_listed_together(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    change_tensors(
        model,
        **{
            "model.norm.weight": None,
            "model.layers.0.mlp.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"][:-1].clone(),
            "model.layers.2.mlp.up_proj.weight": tensors["model.norm.weight"].clone(),
        },
    )
    with pytest.raises(ModelLoadError) as caught:
        load(model)
    assert str(caught.value) == (
        f"{model}: tensors do not fit config.json: 1 missing: model.norm.weight; "
        "1 not used by the model: model.layers.2.mlp.up_proj.weight; "
        "1 of another shape: model.layers.0.mlp.up_proj.weight in model.safetensors is [47, 32] "
        "and should be [48, 32]"
    )


def test_a_long_list_of_tensors_is_cut(model: Path) -> None:
    edit_config(model, num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"22 missing: .*, \.\.\.$"):
        load(model)


def test_a_bias_that_the_config_does_not_know_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama", attention_bias=True)
    edit_config(path, attention_bias=False)
    with pytest.raises(ModelLoadError, match=r"8 not used by the model: model\.layers\.0\.self_attn"):
        load(path)


def test_a_head_stored_beside_a_tied_embedding_and_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    path = make_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    change_tensors(
        path,
        **{
            "lm_head.weight": tensors["model.embed_tokens.weight"] * 2,
            "model.layers.0.self_attn.rotary_emb.inv_freq": tensors["model.norm.weight"][:8].clone(),
        },
    )
    assert load(path).info.vocab_size > 0


def test_pickled_weights_are_not_read(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only safetensors weights are read"):
        load(model)


def test_damaged_weights_are_refused(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be opened"):
        load(model)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path, shard="20KB")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"{shard.name}: cannot be opened"):
        load(path)


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, shard="20KB")
    index = path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    first, other = (
        "model.norm.weight",
        next(f for f in raw["weight_map"].values() if f != raw["weight_map"]["model.norm.weight"]),
    )
    raw["weight_map"][first] = other
    index.write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is said to be in"):
        load(path)
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read as a weight index"):
        load(path)


def test_weights_of_another_type_are_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor.double() for name, tensor in tensors.items()}, model / "model.safetensors")
    with pytest.raises(
        UnsupportedModel, match="stored as F64; the torch engine computes in float32, bfloat16"
    ):
        load(model)


def test_unknown_types_and_devices_are_refused(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="dtype must be auto or one of float32"):
        load(model, dtype="int8")
    for device in ("gpu", "meta"):
        with pytest.raises(ModelLoadError, match=f"device '{device}' is not"):
            load(model, device=device)


def test_a_gpu_that_is_not_there_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match=r"device 'cuda:3' is not there: this machine has 1 CUDA device"):
        load(model, device="cuda:3")


@pytest.mark.parametrize(("paged", "least"), [(False, 1), (True, 16)])
def test_a_kv_cache_without_room_for_anything_is_refused(model: Path, paged: bool, least: int) -> None:
    config = ModelConfig(path=str(model), kv_cache=least - 1 or -1)
    with pytest.raises(ModelLoadError, match=rf"too small: it must hold {least} at least"):
        TorchEngine(config, paged=paged)


def test_a_model_that_does_not_fit_the_memory_is_a_load_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory, tried to allocate 8 GiB")

    monkeypatch.setattr("tokenflow.engines.torch.engine.load_weights", refuse)
    with pytest.raises(ModelLoadError, match=r"do not fit on cpu: out of memory.*; choose a smaller dtype"):
        load(model)
