"""Contiguous KV cache: one row of the arena per request.  The default on a CPU.

Nothing is gathered: attention reads rows in place, and neighbouring rows of similar length in one call.
Rows are as long as a request may become, which costs address space only: memory is touched as tokens come,
and given back to the system when they go.  What lies behind a row's tokens is always zero, so that a masked
key or value is a finite number whatever an earlier request left there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tokenflow.engines.base import Feed, Opened
from tokenflow.engines.prefix import common_prefix
from tokenflow.engines.torch.arena import Arena
from tokenflow.engines.torch.config import ModelSpec
from tokenflow.engines.torch.kv import CausalMasks, Plan, Queries, Read, blocks_of, integers
from tokenflow.errors import EngineError

_CALL_COST = 32_768
"""What one more attention call costs, in wasted keys times query channels (measured: about 9 us)."""

_SLICE = 8
"""Feeds of at least this many tokens are written as a slice; the others in one indexed write."""


@dataclass(slots=True)
class _Row:
    tokens: list[int] = field(default_factory=list)
    open: bool = False
    used: int = 0


class _Strip(NamedTuple):
    """Where a read lies in a layer: size and offset of its keys; its values lie ``kv_heads`` heads later."""

    size: tuple[int, int, int, int]
    offset: int


class _Places(NamedTuple):
    """Where a step writes: the first ``scattered`` tokens by row and position, then whole slices of tokens
    as (row, position, first token, stop)."""

    scattered: int
    rows: Tensor
    positions: Tensor
    slices: tuple[tuple[int, int, int, int], ...]


class RowCache:
    """A :class:`~tokenflow.engines.torch.kv.KVCache` of one row per slot.

    :param row_length: most tokens of one row.
    :param capacity: most tokens of all rows, released ones that are kept for their prefix included.
    :param max_open: most rows open at once; further rows only keep prefixes.
    :param reuse: look for prefixes in other rows.
    :raises ModelLoadError: if the address space cannot be had.
    """

    block_size = 1

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_length: int,
        capacity: int,
        max_open: int,
        reuse: bool,
    ) -> None:
        self.capacity = capacity
        self._max_open = max_open
        self._reuse = reuse
        self._device = device
        self._kv_heads = spec.kv_heads
        self._channels = spec.heads * spec.head_dim
        rows = 2 * max_open if reuse else max_open
        self._arena = Arena(spec, rows, row_length, dtype, device)
        self._kv = self._arena.tensor
        self._by_token = [layer.transpose(1, 2) for layer in self._kv]
        self._layer_stride, *self._strides = self._kv.stride()
        self._head_dim = spec.head_dim
        self._values = spec.kv_heads * self._strides[1]
        self._rows = [_Row() for _ in range(rows)]
        self._held = 0
        self._clock = 0
        self._masks = CausalMasks(spec.heads // spec.kv_heads, dtype, device)

    def open(self, tokens: Sequence[int]) -> Opened:
        if sum(row.open for row in self._rows) >= self._max_open:
            raise EngineError(f"all {self._max_open} slots are taken; release one first")
        wanted = list(tokens)
        source, shared = self._longest_prefix(wanted) if self._reuse else (None, 0)
        slot = next(i for i, row in enumerate(self._rows) if not row.open)
        if source == slot:
            if self._held + shared <= self.capacity and len(self._rows[slot].tokens) > shared:
                self._move_away(slot, None)
            self._cut(slot, shared)
        else:
            self._move_away(slot, source)
            self._cut(slot, 0)
            if source is not None:
                shared = self._borrow(source, slot, shared)
        self._rows[slot].open = True
        return Opened(slot, shared)

    def length(self, slot: int) -> int:
        return len(self._row(slot).tokens)

    def plan(self, feeds: Sequence[Feed]) -> Plan:
        need = sum(len(feed.tokens) for feed in feeds)
        if self._make_room(need) < need:
            raise EngineError(
                f"KV cache full: {need} more tokens do not fit beside the {self._held} "
                f"of the open slots (capacity {self.capacity})"
            )
        singles = sorted((slot, i) for i, (slot, tokens) in enumerate(feeds) if len(tokens) == 1)
        longer = sorted((len(feed.tokens), i) for i, feed in enumerate(feeds) if len(feed.tokens) > 1)
        rows = [slot for slot, _ in singles]
        ids = [feeds[i].tokens[0] for _, i in singles]
        positions = [len(self._rows[slot].tokens) for slot in rows]
        stop = max(positions, default=-1) + 1
        reads = list(self._single_reads(rows, positions))
        slices: list[tuple[int, int, int, int]] = []
        for count, i in longer:
            slot, tokens = feeds[i]
            past, start = len(self._rows[slot].tokens), len(ids)
            ids += tokens
            positions += range(past, past + count)
            stop = max(stop, past + count)
            queries = blocks_of(start, past, count, self._masks)
            reads.append(self._strip(slot, 1, past + count, queries))
            if count < _SLICE:
                rows += [slot] * count
            else:
                slices.append((slot, past, start, start + count))
        places = integers(positions, self._device)
        return Plan(
            # Of a list: CPython cuts tuples of generators to length, and keeps up to 2,000 of each length.
            order=tuple([i for _, i in (*singles, *longer)]),
            feeds=tuple(feeds),
            ids=integers(ids, self._device),
            positions=places,
            stop=stop,
            reads=tuple(reads),
            where=_Places(len(rows), integers(rows, self._device), places[: len(rows)], tuple(slices)),
        )

    def write(self, layer: int, kv: Tensor, plan: Plan) -> None:
        places: _Places = plan.where
        target = self._by_token[layer]
        if places.scattered:
            source = kv if places.scattered == len(kv) else kv[: places.scattered]
            target.index_put_((places.rows, places.positions), source)
        for row, position, start, stop in places.slices:
            target[row, position : position + stop - start] = kv[start:stop]

    def read(self, layer: int, read: Read) -> tuple[Tensor, Tensor]:
        strip: _Strip = read.where
        offset = layer * self._layer_stride + strip.offset
        return (
            self._kv.as_strided(strip.size, self._strides, offset),
            self._kv.as_strided(strip.size, self._strides, offset + self._values),
        )

    def commit(self, plan: Plan) -> None:
        for slot, tokens in plan.feeds:
            self._rows[slot].tokens += tokens
            self._held += len(tokens)

    def abandon(self, plan: Plan) -> None:
        for slot, tokens in plan.feeds:
            past = len(self._rows[slot].tokens)
            self._arena.clear(slot, past, past + len(tokens))

    def truncate(self, slot: int, length: int) -> None:
        row = self._row(slot)
        if not 0 <= length <= len(row.tokens):
            raise EngineError(f"cannot truncate slot {slot} to {length} tokens: it holds {len(row.tokens)}")
        self._cut(slot, length)

    def release(self, slot: int) -> None:
        row = self._row(slot)
        row.open = False
        self._touch(slot)
        if not self._reuse:
            self._cut(slot, 0)

    def _row(self, slot: int) -> _Row:
        if not 0 <= slot < len(self._rows) or not self._rows[slot].open:
            raise EngineError(f"slot {slot} is not open")
        return self._rows[slot]

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._rows[slot].used = self._clock

    def _longest_prefix(self, tokens: list[int]) -> tuple[int | None, int]:
        """The row that shares most first tokens; of equals one that can be taken over as it is."""
        source, best = None, 0
        for index, row in enumerate(self._rows):
            held = row.tokens
            # Only a row that agrees in the next token can share more, which spares most comparisons.
            longer = len(held) > best and best < len(tokens) - 1 and held[best] == tokens[best]
            whole = len(held) == best and not row.open
            if best and whole and held == tokens[:best]:
                source = index
            elif longer and (shared := common_prefix(held, tokens, len(tokens) - 1)) > best:
                source, best = index, shared
        return source, best

    def _move_away(self, slot: int, source: int | None) -> None:
        """Copy the tokens of a row that is to be used to another row, unless they are the oldest ones.

        New slots take the lowest row that is not open: open rows stay neighbours, and few attention calls
        serve them all.
        """
        row = self._rows[slot]
        others = [i for i, other in enumerate(self._rows) if not other.open and i not in (slot, source)]
        if row.tokens and others:
            spare = min(others, key=lambda i: (bool(self._rows[i].tokens), self._rows[i].used))
            if not self._rows[spare].tokens or self._rows[spare].used < row.used:
                self._cut(spare, 0)
                self._copy(slot, spare, len(row.tokens))

    def _borrow(self, source: int, slot: int, shared: int) -> int:
        """Give the empty row ``slot`` the first tokens of ``source``, as many as fit; how many it got."""
        row = self._rows[source]
        fits = self._held + shared <= self.capacity
        used_up = not row.open and (len(row.tokens) == shared or not fits)
        if not used_up:
            shared = self._make_room(shared)
        self._copy(source, slot, shared)
        if used_up:
            self._cut(source, 0)
        self._touch(source)
        return shared

    def _copy(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` tokens of a row to an empty one."""
        self._arena.copy(source, target, count)
        self._rows[target].tokens = self._rows[source].tokens[:count]
        self._rows[target].used = self._rows[source].used
        self._held += count

    def _make_room(self, need: int) -> int:
        """Drop released rows, the oldest first, until ``need`` tokens fit; how many fit."""
        while self._held + need > self.capacity:
            kept = [i for i, row in enumerate(self._rows) if not row.open and row.tokens]
            if not kept:
                break
            self._cut(min(kept, key=lambda i: self._rows[i].used), 0)
        return max(0, min(need, self.capacity - self._held))

    def _cut(self, slot: int, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        row = self._rows[slot]
        stop = len(row.tokens)
        if length == stop:
            return
        self._arena.clear(slot, length, stop)
        del row.tokens[length:]
        self._held -= stop - length

    def _strip(self, slot: int, rows: int, keys: int, queries: tuple[Queries, ...]) -> Read:
        size = (rows, self._kv_heads, keys, self._head_dim)
        return Read(_Strip(size, slot * self._strides[0]), keys, queries)

    def _single_reads(self, rows: Sequence[int], pasts: Sequence[int]) -> Iterator[Read]:
        """Reads of one token in each of the sorted ``rows``, after the ``pasts`` tokens that they hold."""
        seen = [past + 1 for past in pasts]
        mask = None
        start = 0
        for stop in cuts(rows, seen, _CALL_COST // self._channels):
            part = seen[start:stop]
            keys = max(part)
            uneven = None
            if min(part) < keys:
                if mask is None:
                    mask = self._masks.of_singles(seen, max(seen))
                uneven = mask[start:stop, ..., :keys]
            queries = (Queries(start, stop - start, 1, keys, uneven),)
            yield self._strip(rows[start], stop - start, keys, queries)
            start = stop


def cuts(rows: Sequence[int], keys: Sequence[int], call_cost: int) -> list[int]:
    """Where to cut sorted ``rows``, each with some ``keys``, into attention calls: the stops.

    A call spans neighbouring rows and reads all of them to the length of the longest; a further call costs
    as much as ``call_cost`` wasted keys.
    """
    stops: list[int] = []
    start = longest = 0
    for index, count in enumerate(keys):
        if index > start:
            waste = (count - longest) * (index - start) if count > longest else longest - count
            if rows[index] != rows[index - 1] + 1 or waste > call_cost:
                stops.append(index)
                start, longest = index, 0
        longest = max(longest, count)
    return [*stops, len(rows)] if rows else stops
