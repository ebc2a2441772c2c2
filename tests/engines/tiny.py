"""Tiny random models in Hugging Face layout, made with transformers, which is also the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 96
CONTEXT = 256

_FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_model(
    path: Path, family: str = "qwen3", *, seed: int = 0, shard: str = "1GB", **settings: Any
) -> Path:
    """Save a random model of ``family``; ``settings`` change its config.  Returns ``path``."""
    config_type, model_type = _FAMILIES[family]
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if family == "qwen3":
        shape["head_dim"] = 16
    torch.manual_seed(seed)
    model = model_type(config_type(**shape | settings))
    # Freshly made biases are zero and norms one: a forward pass that forgot them would go unnoticed.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    model.save_pretrained(path, max_shard_size=shard)
    return path


def edit_config(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of a saved ``config.json``."""
    file = path / "config.json"
    raw = json.loads(file.read_text())
    for key in remove:
        del raw[key]
    file.write_text(json.dumps(raw | changes))


def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same model as transformers runs it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return model


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits of every position, [n, V]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()
