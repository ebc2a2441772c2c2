"""The mailbox of a model actor: ready requests, handed out in batches once enough are there.

``take`` is where batches are delayed (TokenRouter, arXiv 2610.12242, section 4).  Items stay in the
mailbox until a batch is handed out, so a cancelled ``take`` loses nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A set of ready items in arrival order, with one consumer."""

    def __init__(self, hold_s: Callable[[], float], patience_s: Callable[[], float]) -> None:
        """Both functions are asked again whenever something changes: how many seconds a batch of what is
        ready had better wait (0 to start now, infinite until something changes), and how many seconds an item
        waits at most."""
        self._hold_s = hold_s
        self._patience_s = patience_s
        self._ready: dict[T, float] = {}
        self._urgent: set[T] = set()
        self._poked = False
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, item: T) -> bool:
        return item in self._ready

    def put(self, item: T, *, urgent: bool = False) -> None:
        """Add a ready item; an urgent one makes the next batch start whatever the others wait for.

        One that is there already keeps its place and its age.
        """
        self._ready.setdefault(item, asyncio.get_running_loop().time())
        if urgent:
            self._urgent.add(item)
        self._wake()

    def discard(self, item: T) -> None:
        """Take an item out again, if it is there."""
        self._ready.pop(item, None)
        self._urgent.discard(item)

    def poke(self) -> None:
        """Let the consumer go now, without a batch if none is due: there is other news for the worker."""
        self._poked = True
        self._wake()

    def reconsider(self) -> None:
        """What decides when batches start may have changed: let a waiting consumer look again."""
        self._wake()

    @property
    def due(self) -> bool:
        """Whether a batch would be handed out now."""
        if self._urgent:
            return True
        if not self._ready:
            return False
        return self._hold_s() <= 0 or asyncio.get_running_loop().time() >= self._deadline()

    async def take(self, limit: int) -> list[T]:
        """Wait until a batch is due and hand it out: all ready items in order of arrival, at most ``limit``.

        A batch is due when it need not be held back, an urgent item is ready, or the oldest item's
        patience is over.  It is empty if the mailbox was poked and none is due.
        """
        loop = asyncio.get_running_loop()
        while not ((due := self.due) or self._poked):
            self._waiter = loop.create_future()
            look_again = min(self._deadline(), loop.time() + self._hold_s()) if self._ready else math.inf
            timer = loop.call_at(look_again, self._wake) if look_again < math.inf else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        self._poked = False
        batch = list(self._ready)[:limit] if due else []
        for item in batch:
            self.discard(item)
        return batch

    def _deadline(self) -> float:
        return next(iter(self._ready.values())) + self._patience_s()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
