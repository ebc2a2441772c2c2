"""Rotary position embedding (RoFormer, arXiv 2104.09864) with the llama3 and YaRN context stretches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenflow.engines.torch.config import RopeSpec


class Rope:
    """Cosines and sines of the positions seen so far; the tables double as positions grow.

    The sine's first half is negated, so that a rotation is ``x * cos + roll(x, head_dim / 2) * sin``.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse = inverse_frequencies(spec, head_dim)
        self._scale = spec.attention_factor
        self._dtype = dtype
        self._device = device
        self._table = torch.empty(0)

    def at(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [n, 1, head_dim] each, at ``positions`` (int64 [n], all below ``stop``)."""
        if stop > len(self._table):
            self._table = self._build(max(256, 1 << (stop - 1).bit_length()))
        cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos, sin

    def _build(self, length: int) -> Tensor:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._inverse
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1) * self._scale
        return table[:, :, None].to(self._device, self._dtype)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each channel pair, float32 [head_dim / 2]."""
    plain = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain, head_dim)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """As Llama 3.1 does: long waves are stretched, short ones kept, with a linear blend in between."""
    wavelength = 2 * math.pi / plain
    turns = spec.original_length / wavelength
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / spec.factor + kept * plain


def _yarn(spec: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: the ramp runs over channel indices between two turn counts."""

    def channel(turns: float) -> float:
        return head_dim * math.log(spec.original_length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / spec.factor * stretched + plain * (1 - stretched)
