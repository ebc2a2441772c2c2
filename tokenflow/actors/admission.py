"""The door: how many requests may wait for memory, and with how many prompt tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenflow.errors import InvalidRequest, Overloaded
from tokenflow.numeric import is_integer
from tokenflow.types import Reservation


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait at most before it is admitted to memory; :raises ValueError: if that is no number.

    :param requests: requests, those included whose prompts are being read; those that can begin at once come
        on top.
    :param tokens: prompt tokens of all that wait together; one reservation alone may have more.
    """

    requests: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("requests", "tokens"):
            if not is_integer(most := getattr(self, name), least=0):
                raise ValueError(f"max_queued_{name} must be an integer of at least 0, got {most!r}")


class Admission:
    """Counts what waits, at once when it comes, so that a burst cannot slip past the limits.

    :param free: how many requests could begin now, if nothing waited.
    """

    def __init__(self, limits: QueueLimits, free: Callable[[], int]) -> None:
        self._limits = limits
        self._free = free
        self._arriving = 0
        self._waiting: dict[int, tuple[int, Reservation]] = {}
        self._tokens = 0

    @contextmanager
    def reserve(self, requests: int = 1) -> Iterator[Reservation]:
        """Places for requests whose prompts are yet to be read; they are to be queued before this ends.

        Where one has room, all have: a reservation that is larger than the queue would never be served.

        :raises InvalidRequest: if it is no number of requests.
        :raises Overloaded: if as many wait as may.
        """
        if not is_integer(requests, least=1):
            raise InvalidRequest(f"requests must be an integer of at least 1, got {requests!r}", "requests")
        room = self._limits.requests + (0 if self._waiting else self._free())
        if self._arriving + len(self._waiting) >= room:
            raise Overloaded(
                f"{self._limits.requests} requests wait, and no more may (max_queued_requests); "
                "try again later"
            )
        reservation = Reservation(requests)
        self._arriving += requests
        try:
            yield reservation
        finally:
            self._arriving -= reservation.left
            reservation.left = 0

    def queue(self, request: int, tokens: int, reservation: Reservation) -> None:
        """A request with a prompt of so many tokens waits from now on, in a place that is reserved.

        :raises Overloaded: if the prompts that wait would have more tokens than they may.
        """
        if not reservation.left:
            raise RuntimeError("every place of this reservation is taken")
        if self._tokens > reservation.tokens and self._tokens + tokens > self._limits.tokens:
            raise Overloaded(
                f"{self._tokens} prompt tokens wait, and with these {tokens} they would be more than "
                f"{self._limits.tokens} (max_queued_tokens); try again later"
            )
        reservation.left -= 1
        self._arriving -= 1
        self._waiting[request] = tokens, reservation
        self._tokens += tokens
        reservation.tokens += tokens

    def leave(self, request: int) -> None:
        """A request waits no longer, whatever becomes of it."""
        if (place := self._waiting.pop(request, None)) is not None:
            tokens, reservation = place
            self._tokens -= tokens
            reservation.tokens -= tokens
