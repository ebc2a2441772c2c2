"""Random models of given shapes, in Hugging Face layout, for measurements that need no sense."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

EOS = 0
SPREAD = 0.02
"""Standard deviation of weights, if nothing else is said.  Greedily, such a model repeats its last token."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a Qwen3 model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 4096
    theta: float = 1e6
    eps: float = 1e-6

    @property
    def parameters(self) -> int:
        """How many weights it has; the embeddings, which are the LM head too, count once."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * self.hidden * (q + kv) + 3 * self.hidden * self.intermediate
        norms = 2 * self.hidden + 2 * self.head_dim
        return self.vocab * self.hidden + self.layers * (layer + norms) + self.hidden

    @property
    def config(self) -> dict[str, Any]:
        """The model's ``config.json``."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rope_theta": self.theta,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "eos_token_id": EOS,
            "torch_dtype": "bfloat16",
        }


TINY = Shape(layers=2, hidden=64, intermediate=192, heads=4, kv_heads=2, head_dim=32, vocab=8192)
"""0.12 million parameters beside an embedding of 0.52 million."""

MID = Shape(layers=8, hidden=512, intermediate=1536, heads=8, kv_heads=4, head_dim=64, vocab=8192)
"""29.4 million parameters."""

LARGE = Shape(layers=30, hidden=640, intermediate=1600, heads=10, kv_heads=5, head_dim=64, vocab=8192)
"""134 million parameters."""

QWEN_0_6B = Shape(
    layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocab=151_936
)
"""596 million parameters, as in Qwen3-0.6B."""


QWEN_8B = Shape(
    layers=36, hidden=4096, intermediate=12_288, heads=32, kv_heads=8, head_dim=128, vocab=151_936
)
"""7.6 billion parameters: Qwen3-8B, but for its own LM head."""


def random_weights(
    shape: Shape, seed: int = 0, device: str = "cpu", spread: float = SPREAD
) -> dict[str, Tensor]:
    """Weights in bfloat16 under their Hugging Face names, drawn on ``device``.

    :param spread: standard deviation of the layers' weights.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, spread: float = spread) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return (drawn * spread).bfloat16().cpu()

    def ones(width: int) -> Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden, SPREAD),
        "model.norm.weight": ones(shape.hidden),
    }
    for index in range(shape.layers):
        layer = {
            "input_layernorm": ones(shape.hidden),
            "post_attention_layernorm": ones(shape.hidden),
            "self_attn.q_norm": ones(shape.head_dim),
            "self_attn.k_norm": ones(shape.head_dim),
            "self_attn.q_proj": matrix(q, shape.hidden),
            "self_attn.k_proj": matrix(kv, shape.hidden),
            "self_attn.v_proj": matrix(kv, shape.hidden),
            "self_attn.o_proj": matrix(shape.hidden, q),
            "mlp.gate_proj": matrix(shape.intermediate, shape.hidden),
            "mlp.up_proj": matrix(shape.intermediate, shape.hidden),
            "mlp.down_proj": matrix(shape.hidden, shape.intermediate),
        }
        weights |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
    return weights


def write_model(folder: Path, shape: Shape, device: str = "cpu", spread: float = SPREAD) -> Path:
    """Write a random model of ``shape`` with a tokenizer of as many words; returns ``folder``.

    :param device: where the weights are drawn.
    :param spread: see :func:`random_weights`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(shape, device=device, spread=spread)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2))
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(shape.vocab)}, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
