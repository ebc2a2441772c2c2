"""Paged KV cache: blocks of tokens handed out from one pool.  The default on a GPU.

Full blocks are shared between slots by reference count, and stay findable after their last slot closed
until their space is needed.  Attention gathers a row's tokens; places behind a row's end are gathered from
block 0, which holds zeros and belongs to nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenflow.engines.base import Opened
from tokenflow.engines.torch.config import ModelSpec
from tokenflow.engines.torch.kv import CausalMasks, Feed, Plan, Queries, Read, blocks_of, integers
from tokenflow.engines.torch.prefix import ROOT, BlockTrie
from tokenflow.errors import EngineError


@dataclass(slots=True)
class _Pages:
    """``chain`` holds the trie serials of the slot's full blocks, as far as they are known."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)


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
        blocks = capacity // block_size
        self.capacity = blocks * block_size
        self.block_size = block_size
        self._max_open = max_open
        self._reuse = reuse
        self._device = device
        self._kv_heads = spec.kv_heads
        shape = (spec.layers, (blocks + 1) * block_size, 2 * spec.kv_heads, spec.head_dim)
        self._pool = torch.empty(shape, dtype=dtype, device=device)
        self._pool[:, :block_size] = 0
        self._slots: dict[int, _Pages] = {}
        self._uses = [0] * (blocks + 1)
        self._free = OrderedDict.fromkeys(range(1, blocks + 1))
        self._trie = BlockTrie()
        self._masks = CausalMasks(spec.heads // spec.kv_heads, dtype, device)
        self._offsets = torch.arange(block_size, device=device)

    def open(self, tokens: Sequence[int]) -> Opened:
        if len(self._slots) >= self._max_open:
            raise EngineError(f"all {self._max_open} slots are taken; release one first")
        slot = next(i for i in range(self._max_open) if i not in self._slots)
        pages = self._slots[slot] = _Pages()
        size = self.block_size
        for start in range(0, (len(tokens) - 1) // size * size if self._reuse else 0, size):
            part = tuple(tokens[start : start + size])
            found = self._trie.find(pages.chain[-1] if pages.chain else ROOT, part)
            if found is None:
                break
            serial, block = found
            self._use(block)
            pages.chain.append(serial)
            pages.blocks.append(block)
            pages.tokens += part
        return Opened(slot, len(pages.tokens))

    def length(self, slot: int) -> int:
        return len(self._pages(slot).tokens)

    def plan(self, feeds: Sequence[Feed]) -> Plan:
        lacking = [
            self._blocks(self.length(feed.slot) + len(feed.tokens)) - len(self._pages(feed.slot).blocks)
            for feed in feeds
        ]
        if sum(lacking) > len(self._free):
            raise EngineError(
                f"KV cache full: {sum(lacking)} more blocks of {self.block_size} tokens are needed and "
                f"{len(self._free)} are free (capacity {self.capacity} tokens)"
            )
        for feed, count in zip(feeds, lacking, strict=True):
            self._pages(feed.slot).blocks += [self._take() for _ in range(count)]
        order = sorted(range(len(feeds)), key=lambda i: len(feeds[i].tokens) > 1)
        ids: list[int] = []
        positions: list[int] = []
        seen: list[int] = []
        reads: list[Read] = []
        for index in order:
            slot, tokens = feeds[index]
            past, count, start = self.length(slot), len(tokens), len(ids)
            ids += tokens
            positions += range(past, past + count)
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
            where=self._new_places([feeds[i] for i in order]),
        )

    def write(self, layer: int, kv: Tensor, plan: Plan) -> None:
        self._pool[layer].index_copy_(0, plan.where, kv)

    def read(self, layer: int, read: Read) -> tuple[Tensor, Tensor]:
        places: Tensor = read.where
        found = self._pool[layer][places].transpose(1, 2)
        return found[:, : self._kv_heads], found[:, self._kv_heads :]

    def commit(self, plan: Plan) -> None:
        for slot, tokens in plan.feeds:
            pages = self._slots[slot]
            pages.tokens += tokens
            if self._reuse:
                self._publish(pages)

    def abandon(self, plan: Plan) -> None:
        for slot, _ in plan.feeds:
            pages = self._slots[slot]
            self._drop(pages, self._blocks(len(pages.tokens)))

    def truncate(self, slot: int, length: int) -> None:
        pages = self._pages(slot)
        if not 0 <= length <= len(pages.tokens):
            raise EngineError(f"cannot truncate slot {slot} to {length} tokens: it holds {len(pages.tokens)}")
        if length == len(pages.tokens):
            return
        self._drop(pages, self._blocks(length))
        del pages.tokens[length:]
        del pages.chain[length // self.block_size :]
        if length % self.block_size:
            self._make_writable(pages)

    def release(self, slot: int) -> None:
        self._drop(self._pages(slot), 0)
        del self._slots[slot]

    def _pages(self, slot: int) -> _Pages:
        pages = self._slots.get(slot)
        if pages is None:
            raise EngineError(f"slot {slot} is not open")
        return pages

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _use(self, block: int) -> None:
        self._uses[block] += 1
        self._free.pop(block, None)

    def _take(self) -> int:
        """The free block that was given back first; whoever could find it no longer can."""
        block, _ = self._free.popitem(last=False)
        self._trie.drop(block)
        self._uses[block] = 1
        return block

    def _drop(self, pages: _Pages, keep: int) -> None:
        """Give back all but the first ``keep`` blocks, the last one first: it is the first to be taken."""
        while len(pages.blocks) > keep:
            block = pages.blocks.pop()
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None
                if not self._trie.holds(block):
                    self._free.move_to_end(block, last=False)

    def _publish(self, pages: _Pages) -> None:
        """Make the blocks that became full findable."""
        size = self.block_size
        for index in range(len(pages.chain), len(pages.tokens) // size):
            part = tuple(pages.tokens[index * size : (index + 1) * size])
            parent = pages.chain[-1] if pages.chain else ROOT
            pages.chain.append(self._trie.add(parent, part, pages.blocks[index]))

    def _make_writable(self, pages: _Pages) -> None:
        """Have the last, partly filled block for this slot alone, findable by nobody."""
        block = pages.blocks[-1]
        if self._uses[block] == 1:
            self._trie.drop(block)
            return
        pages.blocks[-1] = copy = self._take()
        self._uses[block] -= 1
        size = self.block_size
        self._pool[:, copy * size : (copy + 1) * size] = self._pool[:, block * size : (block + 1) * size]

    def _places(self, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Pool index of every token of every slot, [slots, max(lengths)]; 0 behind a slot's end."""
        width = max(self._blocks(n) for n in lengths)
        table: list[int] = []
        for slot, length in zip(slots, lengths, strict=True):
            blocks = self._slots[slot].blocks[: self._blocks(length)]
            table += blocks + [0] * (width - len(blocks))
        starts = integers(table, self._device).view(len(slots), width, 1) * self.block_size
        places = (starts + self._offsets).flatten(1)[:, : max(lengths)]
        ends = integers(lengths, self._device)[:, None]
        return torch.where(torch.arange(max(lengths), device=self._device) < ends, places, 0)

    def _new_places(self, feeds: Sequence[Feed]) -> Tensor:
        """Pool index of every new token."""
        size = self.block_size
        places: list[int] = []
        for slot, tokens in feeds:
            pages = self._slots[slot]
            past = len(pages.tokens)
            places += (pages.blocks[p // size] * size + p % size for p in range(past, past + len(tokens)))
        return integers(places, self._device)
