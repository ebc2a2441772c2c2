"""The door: how many requests may wait for memory, and with how many prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenflow.errors import Overloaded


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait at most before it is admitted to memory.

    :param requests: requests, those included whose prompts are being read.
    :param tokens: prompt tokens of all that wait together; one request alone may have more.
    """

    requests: int
    tokens: int


class Admission:
    """Counts what waits, at once when it comes, so that a burst cannot slip past the limits."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._arriving = 0
        self._waiting: dict[int, int] = {}
        self._tokens = 0

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """A place for a request whose prompt is yet to be read; it is to be queued before this ends.

        :raises Overloaded: if as many wait as may.
        """
        waiting = self._arriving + len(self._waiting)
        if waiting >= self._limits.requests:
            raise Overloaded(
                f"{waiting} requests wait, and no more than {self._limits.requests} may "
                "(max_queued_requests); try again later"
            )
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def queue(self, request: int, tokens: int) -> None:
        """A request with a prompt of so many tokens waits from now on.

        :raises Overloaded: if the prompts that wait would have more tokens than they may.
        """
        if self._waiting and self._tokens + tokens > self._limits.tokens:
            raise Overloaded(
                f"{self._tokens} prompt tokens wait, and with these {tokens} they would be more than "
                f"{self._limits.tokens} (max_queued_tokens); try again later"
            )
        self._waiting[request] = tokens
        self._tokens += tokens

    def leave(self, request: int) -> None:
        """A request waits no longer, whatever becomes of it."""
        self._tokens -= self._waiting.pop(request, 0)
