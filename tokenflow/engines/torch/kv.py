"""The KV cache as the forward pass sees it, whatever way the memory is laid out.

A step is *planned* before it runs: the cache makes room, fixes the order of the tokens and says which of
its keys each group of queries attends to.  Heads of a group share their keys, so the queries of a row are
viewed as [kv_heads, queries * group, head_dim] and attended in one call without copying keys; on a CPU
this is several times faster than ``enable_gqa``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenflow.engines.base import Feed, Opened

QUERY_BLOCK = 64
"""Queries of one row attended at once: each block reads only the keys up to its own end."""


class Queries(NamedTuple):
    """Tokens ``start`` to ``start + rows * each`` of a step: ``each`` queries in each of ``rows`` rows.

    They attend to the first ``keys`` positions of their row; ``mask`` is added to the scores
    ([rows or 1, 1, each * group, keys]), ``None`` where every query sees every key.
    """

    start: int
    rows: int
    each: int
    keys: int
    mask: Tensor | None


class Read(NamedTuple):
    """What :meth:`KVCache.read` is asked for (``where`` is the cache's own), and the queries it is for."""

    where: Any
    keys: int
    queries: tuple[Queries, ...]


class Plan(NamedTuple):
    """One step, laid out: single tokens first, then the longer feeds.

    :param order: indices of the feeds in the order of their tokens.
    :param ids: token ids, int64 [n].
    :param positions: of the tokens, int64 [n], all below ``stop``.
    :param where: where the cache writes the tokens' keys and values; the cache's own.
    """

    order: tuple[int, ...]
    feeds: tuple[Feed, ...]
    ids: Tensor
    positions: Tensor
    stop: int
    reads: tuple[Read, ...]
    where: Any


class KVCache(Protocol):
    """Keys and values of all slots; see :class:`tokenflow.engines.base.Engine` for the slot methods."""

    capacity: int
    block_size: int

    def open(self, tokens: Sequence[int]) -> Opened:
        """Open a slot, with the longest cached prefix of ``tokens``, always shorter than ``tokens``.

        :raises EngineError: if every slot is taken.
        """

    def length(self, slot: int) -> int:
        """Tokens held by the slot."""

    def plan(self, feeds: Sequence[Feed]) -> Plan:
        """Make room for ``feeds`` and lay them out; lengths change with :meth:`commit` only.

        :raises EngineError: if the capacity does not allow it.
        """

    def write(self, layer: int, kv: Tensor, plan: Plan) -> None:
        """Store keys and values, [n, 2 * kv_heads, head_dim], of the plan's tokens."""

    def read(self, layer: int, read: Read) -> tuple[Tensor, Tensor]:
        """Keys and values of a read, [rows, kv_heads, keys, head_dim] each."""

    def commit(self, plan: Plan) -> None:
        """The plan ran: its tokens count."""

    def abandon(self, plan: Plan) -> None:
        """The plan failed: forget what it may have written."""

    def truncate(self, slot: int, length: int) -> None:
        """Forget what follows the slot's first ``length`` tokens."""

    def release(self, slot: int) -> None:
        """Close the slot."""


class CausalMasks:
    """Additive masks that hide later keys, for groups of ``group`` query heads.

    They are windows of two tensors that double as keys grow, so a step builds next to nothing.
    """

    def __init__(self, group: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._dtype = dtype
        self._device = device
        self._length = 0
        self._shifts = self._steps = torch.empty(0)

    def of_singles(self, seen: Sequence[int], keys: int) -> Tensor:
        """[len(seen), 1, 1, keys]: the one query of row i sees the first ``seen[i]`` keys."""
        self._grow(keys)
        rows = integers([self._length - n for n in seen], self._device)
        return self._shifts[:, :keys].index_select(0, rows)[:, None, None]

    def of_block(self, count: int, keys: int) -> Tensor:
        """[1, 1, count * group, keys]: the last of ``count`` queries sees every key, each other one less."""
        self._grow(keys)
        stop = self._length + count
        mask = self._steps[None, None, : count * self._group, stop - keys : stop]
        # A GPU's kernels want masks that are aligned; on a CPU the window does as it is.
        return mask if self._device.type == "cpu" else mask.contiguous()

    def _grow(self, keys: int) -> None:
        if keys <= self._length:
            return
        length = self._length = max(256, 1 << (keys - 1).bit_length())
        line = torch.zeros(2 * length + 1, dtype=self._dtype, device=self._device)
        line[length:] = float("-inf")
        # Row r is the line from its r-th element on: it lets length - r keys through.
        self._shifts = line.as_strided((length + 1, length), (1, 1))
        last_seen = length + torch.arange(QUERY_BLOCK, device=self._device).repeat_interleave(self._group)
        hidden = torch.arange(length + QUERY_BLOCK, device=self._device) > last_seen[:, None]
        steps = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        self._steps = steps.masked_fill_(hidden, float("-inf"))


def integers(values: Iterable[int], device: torch.device) -> Tensor:
    """An int64 vector; several times faster than ``torch.tensor`` on a list."""
    numbers = array("q", values)
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(numbers, dtype=torch.int64).to(device)


def blocks_of(start: int, past: int, each: int, masks: CausalMasks) -> tuple[Queries, ...]:
    """The queries of one row that feeds ``each`` tokens after ``past``, cut into query blocks."""
    blocks = []
    for first in range(0, each, QUERY_BLOCK):
        count = min(QUERY_BLOCK, each - first)
        keys = past + first + count
        mask = masks.of_block(count, keys) if count > 1 else None
        blocks.append(Queries(start + first, 1, count, keys, mask))
    return tuple(blocks)


def attend(queries: Tensor, cache: KVCache, layer: int, plan: Plan) -> Tensor:
    """Causal grouped-query attention of a step.

    :param queries: [n, heads, head_dim], rotated; keys and values of the step are in the cache already.
    :returns: [n, heads * head_dim].
    """
    n, heads, width = queries.shape
    keys, values = cache.read(layer, plan.reads[0])
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = queries.view(n, kv_heads, group, width)
    first = plan.reads[0].queries[0]
    if first.each == 1 and first.rows == n:
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=first.mask)
        return mixed.reshape(n, heads * width)
    out = torch.empty((n, kv_heads, group, width), dtype=queries.dtype, device=queries.device)
    for index, read in enumerate(plan.reads):
        if index:
            keys, values = cache.read(layer, read)
        for part in read.queries:
            stop = part.start + part.rows * part.each
            k, v = keys, values
            if part.keys < read.keys:
                k, v = keys[:, :, : part.keys], values[:, :, : part.keys]
            q = grouped[part.start : stop]
            if part.each == 1:
                out[part.start : stop] = F.scaled_dot_product_attention(q, k, v, attn_mask=part.mask)
                continue
            shape = (part.rows, part.each, kv_heads, group, width)
            folded = q.view(shape).transpose(1, 2).reshape(part.rows, kv_heads, part.each * group, width)
            mixed = F.scaled_dot_product_attention(folded, k, v, attn_mask=part.mask)
            out[part.start : stop].view(shape).copy_(
                mixed.view(part.rows, kv_heads, part.each, group, width).transpose(1, 2)
            )
    return out.view(n, heads * width)
