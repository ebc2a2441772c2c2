"""Paged KV cache: blocks of tokens handed out from one pool.  The default on a GPU.

Attention gathers a row's tokens; places behind a row's end are gathered from block 0, which holds zeros
and belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenflow.engines.base import Feed, Opened
from tokenflow.engines.blocks import Blocks
from tokenflow.engines.torch.config import ModelSpec
from tokenflow.engines.torch.kv import CausalMasks, Plan, Queries, Read, blocks_of, integers


class PagedCache:
    """A :class:`~tokenflow.engines.torch.kv.KVCache` of ``capacity`` tokens in blocks of ``block_size``.

    :param max_open: most slots open at once.
    :param reuse: share full blocks with equal prefixes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_size: int,
        capacity: int,
        max_open: int,
        reuse: bool,
    ) -> None:
        self._books = Blocks(capacity // block_size, block_size, max_open, reuse, self._copy)
        self.capacity = self._books.capacity
        self.block_size = block_size
        self._device = device
        self._kv_heads = spec.kv_heads
        shape = (spec.layers, self.capacity + block_size, 2 * spec.kv_heads, spec.head_dim)
        self._pool = torch.empty(shape, dtype=dtype, device=device)
        self._pool[:, :block_size] = 0
        self._masks = CausalMasks(spec.heads // spec.kv_heads, dtype, device)
        self._offsets = torch.arange(block_size, device=device)

    def open(self, tokens: Sequence[int]) -> Opened:
        return self._books.open(tokens)

    def length(self, slot: int) -> int:
        return self._books.length(slot)

    def plan(self, feeds: Sequence[Feed]) -> Plan:
        self._books.reserve(feeds)
        order = sorted(range(len(feeds)), key=lambda i: len(feeds[i].tokens) > 1)
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        seen: list[int] = []
        reads: list[Read] = []
        for index in order:
            slot, tokens = feeds[index]
            past, count, start = self.length(slot), len(tokens), len(ids)
            ids += tokens
            positions += range(past, past + count)
            places += self._books.places(slot, past, past + count)
            if count == 1:
                seen.append(past + 1)
            else:
                queries = blocks_of(start, past, count, self._masks)
                reads.append(Read(self._places([slot], [past + count]), past + count, queries))
        if seen:
            keys = max(seen)
            mask = self._masks.of_singles(seen, keys) if min(seen) < keys else None
            singles = self._places([feeds[i].slot for i in order[: len(seen)]], seen)
            reads.insert(0, Read(singles, keys, (Queries(0, len(seen), 1, keys, mask),)))
        return Plan(
            order=tuple(order),
            feeds=tuple(feeds),
            ids=integers(ids, self._device),
            positions=integers(positions, self._device),
            stop=max(positions) + 1,
            reads=tuple(reads),
            where=integers(places, self._device),
        )

    def write(self, layer: int, kv: Tensor, plan: Plan) -> None:
        self._pool[layer].index_copy_(0, plan.where, kv)

    def read(self, layer: int, read: Read) -> tuple[Tensor, Tensor]:
        places: Tensor = read.where
        found = self._pool[layer][places].transpose(1, 2)
        return found[:, : self._kv_heads], found[:, self._kv_heads :]

    def commit(self, plan: Plan) -> None:
        self._books.commit(plan.feeds)

    def abandon(self, plan: Plan) -> None:
        self._books.abandon(plan.feeds)

    def truncate(self, slot: int, length: int) -> None:
        self._books.truncate(slot, length)

    def release(self, slot: int) -> None:
        self._books.release(slot)

    def _copy(self, source: int, target: int) -> None:
        size = self.block_size
        self._pool[:, target * size : (target + 1) * size] = self._pool[
            :, source * size : (source + 1) * size
        ]

    def _places(self, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Pool index of every token of every slot, [slots, max(lengths)]; 0 behind a slot's end."""
        size = self.block_size
        width = -(-max(lengths) // size)
        table: list[int] = []
        for slot, length in zip(slots, lengths, strict=True):
            blocks = self._books.of(slot)[: -(-length // size)]
            table += [*blocks, *[0] * (width - len(blocks))]
        starts = integers(table, self._device).view(len(slots), width, 1) * size
        places = (starts + self._offsets).flatten(1)[:, : max(lengths)]
        ends = integers(lengths, self._device)[:, None]
        return torch.where(torch.arange(max(lengths), device=self._device) < ends, places, 0)
