"""What a model will take of its device is read from its files, before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.tiny import CONTEXT, VOCAB, edit_config, make_model
from tests.recipes import ENGINE
from tokenflow.engines import memory
from tokenflow.engines.load import claim
from tokenflow.engines.memory import alone, available_bytes, claim_of, stored_sizes
from tokenflow.engines.torch import TorchEngine
from tokenflow.engines.torch.linear import packs
from tokenflow.engines.torch.weights import Weights
from tokenflow.errors import ModelLoadError, ModelNotFound, UnsupportedModel
from tokenflow.settings import SGLANG_CORES
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import Claim, DeviceShare

CPU = torch.device("cpu")
FREE = 2**32


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setattr(memory, "available_bytes", lambda: FREE)
    return ModelConfig(path=str(make_model(tmp_path)), device="cpu", max_requests=3)


def _held(weights: Weights) -> int:
    """Bytes of all matrices, one that two share once."""
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    tensors = {id(t): t for t in (weights.embed, *(m._weight for m in (weights.head, *matrices)))}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_weights_and_cache_are_what_the_engine_really_takes(config: ModelConfig) -> None:
    (share,) = claim(config).shares
    engine = TorchEngine(config)
    held = _held(engine._weights)
    assert 0 <= share.weights - held < 0.05 * held
    assert share.token == 2 * 2 * 2 * 16 * 4
    assert engine.info.kv_capacity == alone(claim(config)) == 3 * CONTEXT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [VOCAB, 2**13])
def test_a_tied_head_that_is_packed_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: int, dtype: str
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: FREE)
    path = make_model(tmp_path, vocab_size=vocab, tie_word_embeddings=True)
    config = ModelConfig(path=str(path), device="cpu", dtype=dtype)
    weights = TorchEngine(config)._weights
    (share,) = claim(config).shares
    held = _held(weights)
    twice = weights.head._weight is not weights.embed
    assert twice == packs(weights.embed.numel(), weights.embed.dtype, CPU)
    assert twice or vocab == VOCAB or dtype != "float32", "the test does not test"
    assert 0 <= share.weights - held < 0.05 * held


def test_a_head_that_is_stored_though_it_is_tied_takes_nothing(tmp_path: Path) -> None:
    config = ModelConfig(path=str(make_model(tmp_path, tie_word_embeddings=True)), device="cpu")
    (before,) = claim(config).shares
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    (after,) = claim(config).shares
    assert after.weights == before.weights


@pytest.mark.parametrize(("dtype", "width"), [("auto", 4), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_smaller_dtype_takes_less(config: ModelConfig, dtype: str, width: int) -> None:
    (wide,), (share,) = claim(config).shares, claim(replace(config, dtype=dtype)).shares
    assert share.token == 2 * 2 * 2 * 16 * width
    assert share.weights == wide.weights * width // 4


def test_quantised_weights_keep_their_size_and_the_others_say_the_dtype(config: ModelConfig) -> None:
    """As where matrices are in eight bits, with scales in float32 first in the file."""
    tensors = {
        "a.scale": torch.ones(8),
        "a.weight": torch.zeros(512, dtype=torch.float8_e4m3fn),
        "embed.weight": torch.zeros(300, dtype=torch.bfloat16),
        "packed.weight": torch.zeros(10, dtype=torch.int32),
    }
    save_file(tensors, Path(config.path) / "model.safetensors")
    assert stored_sizes(Path(config.path)) == ("bfloat16", 308, 512 + 40)
    for dtype, width in (("auto", 2), ("float32", 4)):
        (share,) = claim_of(replace(config, dtype=dtype), CPU).shares
        assert share.weights == 308 * width + 552
        assert share.token == 2 * 2 * 2 * 16 * width


def test_latent_attention_keeps_one_short_row_per_token(config: ModelConfig) -> None:
    edit_config(Path(config.path), kv_lora_rank=24, qk_rope_head_dim=8)
    (share,) = claim_of(config, CPU).shares
    assert share.token == 2 * (24 + 8) * 4


def test_the_ranks_of_a_model_share_its_weights_and_its_heads(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((device.index + 1) * 1000, 10**6))
    (whole,) = claim_of(config, CPU).shares
    claimed = claim_of(config, torch.device("cuda", 1), ranks=4)
    assert [share.device for share in claimed.shares] == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    assert [share.usable for share in claimed.shares] == [1800, 2700, 3600, 4500]
    # Two heads of keys and values for four ranks: each holds one.
    assert {share.token for share in claimed.shares} == {whole.token // 2}
    assert {share.weights for share in claimed.shares} == {whole.weights // 4}


def test_what_is_free_is_shared_within_bounds(config: ModelConfig) -> None:
    (share,) = claim(config).shares
    assert (share.device, share.usable, share.cache) == ("cpu", int(FREE * 0.9), FREE // 4)
    assert claim(config).most_tokens == 3 * CONTEXT
    assert claim(replace(config, context_length=100)).most_tokens == 300


def test_the_cache_of_a_machine_with_much_memory_has_an_end(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**40)
    assert claim(config).shares[0].cache == 8 * 2**30


def test_a_model_wholegets_what_its_weights_leave() -> None:
    share = DeviceShare("cpu", 1000, 900, 300, 7)
    assert alone(Claim([share], 10**6)) == 100
    assert alone(Claim([DeviceShare("cpu", 1000, 350, 300, 7)], 10**6)) == 50
    assert alone(Claim([share], 40)) == 40
    assert alone(Claim([DeviceShare("cpu", 10, 10, 300, 7)], 40)) == 1


def test_free_memory_is_a_part_of_what_there_is() -> None:
    assert 2**20 < available_bytes() <= psutil.virtual_memory().total


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.max").write_text("10000\n")
    assert available_bytes() == 7000
    (tmp_path / "memory.max").write_text("2000\n")
    assert available_bytes() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 2**20


def test_what_cannot_be_run_is_refused_for_its_own_reason(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such directory"):
        claim(replace(config, path="/nowhere"))
    with pytest.raises(UnsupportedModel, match="engine 'tensorrt' does not exist"):
        claim(replace(config, engine="tensorrt"))
    with pytest.raises(ModelLoadError, match="dtype must be auto or one of"):
        claim(replace(config, dtype="int8"))
    weights = Path(config.path) / "model.safetensors"
    for broken in (b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]", b'\x09\0\0\0\0\0\0\0{"a": {}}'):
        weights.write_bytes(broken)
        with pytest.raises(
            ModelLoadError, match=r"model\.safetensors: (has no safetensors header|is damaged)"
        ):
            claim_of(config, CPU)
    weights.unlink()
    with pytest.raises(ModelLoadError, match="only safetensors weights are read"):
        claim_of(config, CPU)


def test_an_engine_that_is_not_installed_is_asked_for_before_anything_is_claimed(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang = replace(config, engine="sglang", tensor_parallel=2)
    monkeypatch.setattr(importlib.metadata, "version", _not_installed)
    with pytest.raises(UnsupportedModel, match=r"needs SGLang 0\.5\.23: pip install"):
        claim(sglang)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv(SGLANG_CORES, f"{core}|{core}")
    assert claim(sglang) == claim(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="rank 1 needs CUDA device 1, and this machine has 1 of them"):
        claim(replace(sglang, device="cuda"))


def _not_installed(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_an_own_engine_may_claim_or_see_to_itself(config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text('{"claim": ["gpu", 9, 8, 7, 6, 5]}')
    toy = replace(config, engine=ENGINE)
    assert claim(toy) == Claim([DeviceShare("gpu", 9, 8, 7, 6)], 5)
    plain = tmp_path / "engine.py"
    plain.write_text("def engine(config):\n    pass\n")
    assert claim(replace(config, engine=f"{plain}:engine")) == Claim([], 0)
