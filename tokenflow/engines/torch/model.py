"""The forward pass: one step of a dense decoder over a flat list of tokens of many slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenflow.engines.torch.config import ModelSpec
from tokenflow.engines.torch.kv import KVCache, Plan, attend
from tokenflow.engines.torch.rope import Rope
from tokenflow.engines.torch.weights import Layer, Weights


def forward(
    spec: ModelSpec, weights: Weights, rope: Rope, cache: KVCache, plan: Plan, wanted: Tensor | None
) -> Tensor:
    """Run a planned step and fill the cache.

    :param wanted: indices of the tokens whose hidden states are wanted, int64 [m]; ``None`` means all, in
        their order.
    :returns: last-layer hidden states after the final norm, [m, hidden_size].
    """
    x = F.embedding(plan.ids, weights.embed)
    cos, sin = rope.at(plan.positions, plan.stop)
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        qkv = _project(spec, layer, x, cos, sin)
        cache.write(index, qkv[:, spec.heads :], plan)
        if index == last and wanted is not None and not len(wanted):
            return x.new_empty((0, spec.hidden_size))
        mixed = attend(qkv[:, : spec.heads], cache, index, plan)
        if index == last and wanted is not None:
            mixed, x = mixed.index_select(0, wanted), x.index_select(0, wanted)
        x = x + layer.out(mixed)
        x = x + _mlp(layer, x)
    return weights.norm(x)


def _project(spec: ModelSpec, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads of queries, keys and values, [n, heads + 2 * kv_heads, head_dim]; the first two rotated."""
    qkv = layer.qkv(layer.attn_norm(x)).view(len(x), -1, spec.head_dim)
    turning = qkv[:, : spec.heads + spec.kv_heads]
    plain = turning if layer.qk_norm is None else layer.qk_norm(turning)
    swapped = plain.roll(spec.head_dim // 2, -1)
    torch.mul(plain, cos, out=turning)
    turning.addcmul_(swapped, sin)
    return qkv


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
    return layer.down(F.silu(gate).mul_(up))
