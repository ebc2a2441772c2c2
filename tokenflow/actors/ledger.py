"""The books of KV cache: which request may hold how many tokens, on every model at once.

A request can come to any model that its recipe reaches, so it is accounted with its whole length on all of
them.  That is more than the caches hold at any moment, and it makes one rule enough: what is in the books
fits every worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pool:
    """A model's KV cache: ``capacity`` tokens in blocks of ``block_size``, for at most ``slots`` requests."""

    capacity: int
    block_size: int
    slots: int

    def blocks(self, length: int) -> int:
        """Blocks that ``length`` tokens take."""
        return -(-length // self.block_size)


class Ledger:
    """Lengths held per request, and blocks used per model.

    :ivar overdrawn: whether some model's cache could not hold what its requests have grown to.
    :ivar slots: requests that every model has room for.
    :ivar longest: tokens that a single request can ever hold.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = tuple(pools.values())
        self._limits = tuple(pool.capacity // pool.block_size for pool in self._pools)
        self._used = [0] * len(self._pools)
        self._held: dict[int, range] = {}
        self.overdrawn = False
        self.slots = min((pool.slots for pool in self._pools), default=0)
        self.longest = min(
            (limit * pool.block_size for limit, pool in zip(self._limits, self._pools, strict=True)),
            default=0,
        )

    def __len__(self) -> int:
        return len(self._held)

    def admits(self, length: int) -> bool:
        """Whether one more request of ``length`` tokens fits every model now."""
        return len(self._held) < self.slots and all(
            used + pool.blocks(length) <= limit
            for used, pool, limit in zip(self._used, self._pools, self._limits, strict=True)
        )

    def hold(self, request: int, length: int) -> None:
        """Set the length a request holds: at admission, and as it grows."""
        held = self._held.get(request, _NOTHING)
        # For every token, and most tokens fit into the last block.
        if length not in held or held is _NOTHING:
            self._book(held, -1)
            self._held[request] = held = self._same_blocks(length)
            self._book(held, 1)

    def reserve(self, request: int, length: int) -> int:
        """Book ``length`` tokens, if there is room for them now; answers how many are booked."""
        held = self._held[request]
        if length <= held[-1]:
            return held[-1]
        longer = self._same_blocks(length)
        self._book(held, -1)
        self._book(longer, 1)
        if self.overdrawn:
            self._book(longer, -1)
            self._book(held, 1)
            return held[-1]
        self._held[request] = range(held.start, longer.stop)
        return longer[-1]

    def use(self) -> list[tuple[int, int]]:
        """Tokens booked and tokens there are, per model in the order of the pools."""
        return [
            (used * pool.block_size, limit * pool.block_size)
            for used, limit, pool in zip(self._used, self._limits, self._pools, strict=True)
        ]

    def release(self, request: int) -> None:
        """Forget a request that may not be held."""
        self._book(self._held.pop(request, _NOTHING), -1)

    def _same_blocks(self, length: int) -> range:
        """All lengths that take as many blocks of every model as this one."""
        blocks = [(pool.blocks(length), pool.block_size) for pool in self._pools]
        first = max(((count - 1) * size + 1 for count, size in blocks), default=0)
        return range(max(first, 0), min((count * size for count, size in blocks), default=0) + 1)

    def _book(self, held: range, sign: int) -> None:
        for index, pool in enumerate(self._pools):
            self._used[index] += sign * pool.blocks(held[-1])
        self.overdrawn = any(used > limit for used, limit in zip(self._used, self._limits, strict=True))


_NOTHING = range(1)
