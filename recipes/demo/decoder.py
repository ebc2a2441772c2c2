"""A plain float32 Qwen3 forward over a fixed KV cache, every row at its own position.

It serves the measurements of this folder: for batches of a hundred short rows on a CPU it is several times
faster than the cache of transformers, and ``python -m recipes.demo.evaluate check`` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer, each projection as [in, out]; query, key and value are one matrix."""

    attention_norm: Tensor
    qkv: Tensor
    query_norm: Tensor
    key_norm: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Features(NamedTuple):
    """What a model says of the next token: hidden states after the final norm [..., H], logits [..., V]."""

    hidden: Tensor
    logits: Tensor


class Decoder:
    """A checkpoint in Hugging Face layout, computed in float32, with room for one batch in its KV cache."""

    def __init__(self, path: Path) -> None:
        model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        self.config = config = model.config
        self.embedding: Tensor = model.model.embed_tokens.weight.data
        self._final_norm: Tensor = model.model.norm.weight.data
        self._layers = [
            Layer(
                attention_norm=block.input_layernorm.weight.data,
                qkv=_columns(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
                query_norm=block.self_attn.q_norm.weight.data,
                key_norm=block.self_attn.k_norm.weight.data,
                output=_columns(block.self_attn.o_proj),
                mlp_norm=block.post_attention_layernorm.weight.data,
                gate_up=_columns(block.mlp.gate_proj, block.mlp.up_proj),
                down=_columns(block.mlp.down_proj),
            )
            for block in model.model.layers
        ]
        self._kv_heads: int = config.num_key_value_heads
        self._group: int = config.num_attention_heads // self._kv_heads
        self._head_dim: int = config.head_dim
        frequencies = config.rope_parameters["rope_theta"] ** (
            -torch.arange(0, self._head_dim, 2) / self._head_dim
        )
        angles = (torch.arange(config.max_position_embeddings)[:, None] * frequencies).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._cache: list[tuple[Tensor, Tensor]] = []

    @property
    def defer_id(self) -> int | None:
        """The id of a Co-LLM checkpoint's defer token, which is a signal and never text."""
        return getattr(self.config, "defer_token_id", None)

    def open(self, rows: int, length: int) -> None:
        """Make the KV cache anew: ``rows`` sequences of at most ``length`` tokens."""
        shape = (rows, self._kv_heads, length, self._head_dim)
        self._cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in self._layers]

    def keep(self, rows: Tensor) -> None:
        """Forget all sequences but ``rows`` (indices [n]), which are renumbered from 0."""
        self._cache = [(keys[rows], values[rows]) for keys, values in self._cache]

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor) -> Features:
        """Feed tokens [n, L] at ``positions`` [n, L]; features are [n, L, ...].

        What the cache holds at a later position is ignored, so right padding may be overwritten.
        """
        rows, width = ids.shape
        end = int(positions.max()) + 1
        # One group of query heads shares a key head: fold the group into the query axis.
        visible = (torch.arange(end) <= positions[:, :, None])[:, None].repeat(1, 1, self._group, 1)
        at = torch.arange(rows)[:, None]
        x = self.embedding[ids]
        for layer, (keys, values) in zip(self._layers, self._cache, strict=True):
            heads = (self._norm(x, layer.attention_norm) @ layer.qkv).view(rows, width, -1, self._head_dim)
            query, key, value = heads.split((self._kv_heads * self._group, self._kv_heads, self._kv_heads), 2)
            keys[at, :, positions] = self._rotate(self._norm(key, layer.key_norm), positions)
            values[at, :, positions] = value
            query = self._rotate(self._norm(query, layer.query_norm), positions)
            query = query.transpose(1, 2).reshape(rows, self._kv_heads, self._group * width, self._head_dim)
            mixed = F.scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end], visible)
            mixed = mixed.view(rows, -1, width, self._head_dim).transpose(1, 2).reshape(rows, width, -1)
            x = x + mixed @ layer.output
            gate, up = (self._norm(x, layer.mlp_norm) @ layer.gate_up).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ layer.down
        hidden = self._norm(x, self._final_norm)
        return Features(hidden, hidden @ self.embedding.T)

    def prefill(self, prompts: list[list[int]], length: int) -> Features:
        """Open the cache for ``prompts`` and feed them; features [n, ...] of each one's last token."""
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        ids = pad(prompts)
        self.open(len(prompts), length)
        hidden, logits = self.forward(ids, torch.arange(ids.shape[1]).expand_as(ids))
        rows = torch.arange(len(prompts))
        return Features(hidden[rows, last], logits[rows, last])

    def extend(self, tokens: Tensor, positions: Tensor) -> Features:
        """Feed one token [n] per sequence at ``positions`` [n]; features [n, ...]."""
        hidden, logits = self.forward(tokens[:, None], positions[:, None])
        return Features(hidden[:, 0], logits[:, 0])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [n, L, heads, D]."""
        low, high = x.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
        return x * self._cos[positions][:, :, None] + turned * self._sin[positions][:, :, None]


def pad(sequences: list[list[int]]) -> Tensor:
    """Token ids as one int64 matrix [n, longest], zeros on the right."""
    width = max(map(len, sequences))
    return torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])


def _columns(*projections: torch.nn.Linear) -> Tensor:
    return torch.cat([projection.weight.data for projection in projections]).T.contiguous()
