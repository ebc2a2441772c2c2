"""When a worker goes on by itself: its next step need not wait for the router to see the last one."""

from __future__ import annotations

from tokenflow.wire.messages import Hello, Step, StepDone


class Ahead:
    """Knows which rows certainly run in the next step: those that stay, and whose responses are not over.

    The router may know better (a stop string, a cancelled request); what it then does not want is dropped
    with the next step that it sends.
    """

    def __init__(self, hello: Hello) -> None:
        self._eos = frozenset(hello.eos_token_ids)
        self._ends: dict[int, frozenset[int]] = {}

    def told(self, step: Step) -> None:
        """What the router says of handles."""
        for handle in step.drop:
            self._ends.pop(handle, None)
        for opened in step.open:
            ends = frozenset(opened.sampling.stop_token_ids)
            self._ends[opened.handle] = ends if opened.sampling.ignore_eos else ends | self._eos

    def handles(self, step: Step, done: StepDone) -> list[int]:
        """The handles that the next step may run without being told; none if the router shall decide."""
        if not step.least or done.failed:
            return []
        left = {row.handle: row.ahead for row in step.rows}
        staying = []
        for row in done.rows:
            if row.token < 0:
                return []
            if not row.destination and left[row.handle] > 0 and row.token not in self._ends[row.handle]:
                staying.append(row.handle)
        return staying if len(staying) >= step.least else []
