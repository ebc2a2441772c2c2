"""The books of a paged KV cache: blocks of tokens handed out from one pool, without the pool itself.

Full blocks are shared between slots by reference count, and stay findable after their last slot closed
until their space is needed.  Block 0 belongs to nobody: places that hold no token may point there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenflow.engines.base import Feed, Opened
from tokenflow.engines.prefix import ROOT, BlockTrie
from tokenflow.errors import EngineError


@dataclass(slots=True)
class _Pages:
    """``chain`` holds the trie serials of the slot's full blocks, as far as they are known."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)


class Blocks:
    """Which slot holds which tokens in which of the blocks 1 to ``count``.

    :param block_size: tokens per block.
    :param max_open: most slots open at once; slots are numbered from 0.
    :param reuse: share full blocks with equal prefixes.
    :param copy: called as ``copy(source, target)`` when a block must be copied before it is written to.
    """

    def __init__(
        self, count: int, block_size: int, max_open: int, reuse: bool, copy: Callable[[int, int], None]
    ) -> None:
        self.block_size = block_size
        self.capacity = count * block_size
        self._max_open = max_open
        self._reuse = reuse
        self._copy = copy
        self._slots: dict[int, _Pages] = {}
        self._uses = [0] * (count + 1)
        self._free = OrderedDict.fromkeys(range(1, count + 1))
        self._trie = BlockTrie()

    def open(self, tokens: Sequence[int]) -> Opened:
        """Open a slot with the longest known prefix of ``tokens``, always shorter than ``tokens``.

        :raises EngineError: if every slot is taken.
        """
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
        """Tokens held by the slot; :raises EngineError: if it is not open."""
        return len(self._pages(slot).tokens)

    def of(self, slot: int) -> Sequence[int]:
        """The slot's blocks in the order of its tokens, reserved ones included."""
        return self._pages(slot).blocks

    def reserve(self, feeds: Sequence[Feed]) -> None:
        """Have blocks for ``feeds``; lengths change with :meth:`commit` only.

        :raises EngineError: if the capacity does not allow it.
        """
        lacking = [
            self._needed(self.length(feed.slot) + len(feed.tokens)) - len(self._pages(feed.slot).blocks)
            for feed in feeds
        ]
        if sum(lacking) > len(self._free):
            raise EngineError(
                f"KV cache full: {sum(lacking)} more blocks of {self.block_size} tokens are needed and "
                f"{len(self._free)} are free (capacity {self.capacity} tokens)"
            )
        for feed, count in zip(feeds, lacking, strict=True):
            self._pages(feed.slot).blocks += [self._take() for _ in range(count)]

    def places(self, slot: int, start: int, stop: int) -> list[int]:
        """Where positions ``start`` to ``stop`` of a slot lie in the pool, in tokens."""
        size, blocks = self.block_size, self._pages(slot).blocks
        return [blocks[position // size] * size + position % size for position in range(start, stop)]

    def commit(self, feeds: Sequence[Feed]) -> None:
        """The feeds were computed: their tokens count."""
        for slot, tokens in feeds:
            pages = self._slots[slot]
            pages.tokens += tokens
            if self._reuse:
                self._publish(pages)

    def abandon(self, feeds: Sequence[Feed]) -> None:
        """The feeds were not computed: give back what was reserved for them."""
        for slot, _ in feeds:
            pages = self._slots[slot]
            self._drop(pages, self._needed(len(pages.tokens)))

    def truncate(self, slot: int, length: int) -> None:
        """Forget what follows the slot's first ``length`` tokens.

        :raises EngineError: if it does not hold so many.
        """
        pages = self._pages(slot)
        if not 0 <= length <= len(pages.tokens):
            raise EngineError(f"cannot truncate slot {slot} to {length} tokens: it holds {len(pages.tokens)}")
        if length == len(pages.tokens):
            return
        self._drop(pages, self._needed(length))
        del pages.tokens[length:]
        del pages.chain[length // self.block_size :]
        if length % self.block_size:
            self._make_writable(pages)

    def release(self, slot: int) -> None:
        """Close the slot; its full blocks stay findable."""
        self._drop(self._pages(slot), 0)
        del self._slots[slot]

    def _pages(self, slot: int) -> _Pages:
        pages = self._slots.get(slot)
        if pages is None:
            raise EngineError(f"slot {slot} is not open")
        return pages

    def _needed(self, tokens: int) -> int:
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
        self._copy(block, copy)
