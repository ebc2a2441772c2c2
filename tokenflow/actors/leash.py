"""How far a worker may go on by itself, without waiting for the router to see what it has written.

Between the end of a step and the start of the next lie two wake-ups and the router's own work.  Where it is
certain what comes next (the same requests, as far as they stay, and nobody to join them), a worker need not
wait for them.  It is told when that has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from tokenflow.actors.sequence import Sequence
from tokenflow.wire.messages import RowDone

_RARELY = 0.3
_SHARE_OF_NEWEST = 0.1


class Leash:
    """Of one worker.

    :param possible: whether the recipe lets a worker know by itself that a request stays.
    :param free: with how many requests a model starts again and again after a batch of so many, and for how
        many steps that is certain; 0 of them where the router has to decide.
    """

    def __init__(self, possible: bool, free: Callable[[int], tuple[int, float]]) -> None:
        self._possible = possible
        self._free = free
        self._hold: Callable[[], None] | None = None
        self._loose = False
        self._pulled = False
        self._stays = 1.0

    def let(self, batch: Items[Sequence], *, alone: bool) -> tuple[int, dict[int, int]]:
        """With how many requests the worker may go on after the next step, and how far with each.

        Not at all if it had to be held during the last one: then it would probably have to be again.  Nor if
        requests hardly ever stay with this model.

        :param alone: nobody else is waiting.
        """
        calm, self._pulled = not self._pulled, False
        least, steps = self._free(len(batch)) if batch and calm and alone and self.worthwhile else (0, 0)
        self._loose = least > 0 and steps > 0
        if not self._loose:
            return 0, {}
        return least, {sequence.id: int(min(_unseen(sequence), steps)) for sequence in batch}

    @property
    def worthwhile(self) -> bool:
        """Whether memory should be booked for tokens that are not seen at once."""
        return self._possible and self._stays > _RARELY

    def began(self, hold: Callable[[], None]) -> None:
        """A step was sent; ``hold`` tells the worker to begin no other by itself."""
        self._hold = hold

    def pull(self) -> None:
        """Something has changed: the router has to say what the next step is."""
        if self._hold is not None and not self._pulled:
            self._pulled = True
            if self._loose:
                self._hold()

    def saw(self, rows: Items[RowDone]) -> None:
        """What came of a step."""
        if rows:
            stayed = sum(not row.destination for row in rows)
            self._stays += _SHARE_OF_NEWEST * (stayed / len(rows) - self._stays)

    def ended(self) -> None:
        """The worker waits for the next step."""
        self._hold = None


def _unseen(sequence: Sequence) -> int:
    """How many tokens a request may get after the next one: within its limits and what is booked for it."""
    booked = sequence.booked - len(sequence.tokens) - 1
    return max(min(booked, sequence.limits.max_tokens - sequence.output_tokens - 1), 0)
