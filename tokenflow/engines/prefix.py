"""Finding computed prefixes again: by comparison for rows, by a trie of full blocks for pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many first elements two lists share, at most ``limit``."""
    low, high = 0, max(0, min(len(a), len(b), limit))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


ROOT = 0
Key = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class BlockTrie:
    """Full blocks by the tokens that they hold *after* all tokens before them.

    A node is named by a serial number that is never used again, and a block is found under its parent's
    serial and its own tokens: equal keys mean equal prefixes, without hashing collisions, and a block whose
    parent was dropped can never be found by mistake.
    """

    _nodes: dict[Key, tuple[int, int]] = field(default_factory=dict)
    _keys: dict[int, Key] = field(default_factory=dict)
    _serial: int = ROOT

    def find(self, parent: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """(serial, block) of the block that holds ``tokens`` after ``parent``."""
        return self._nodes.get((parent, tokens))

    def add(self, parent: int, tokens: tuple[int, ...], block: int) -> int:
        """Make a block findable; where an equal one is already, that one stays.  Returns its serial."""
        key = (parent, tokens)
        known = self._nodes.get(key)
        if known is not None:
            return known[0]
        self._serial += 1
        self._nodes[key] = (self._serial, block)
        self._keys[block] = key
        return self._serial

    def holds(self, block: int) -> bool:
        """Whether the block can be found."""
        return block in self._keys

    def drop(self, block: int) -> None:
        """Forget a block, if it is known."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._nodes[key]
