"""What a model's worker holds of each request, and what the next step tells it."""

from __future__ import annotations

from collections.abc import Iterable

from tokenflow.actors.sequence import Sequence
from tokenflow.dsl.ir import ModelIR
from tokenflow.wire.messages import Open, Row, Step


class Held:
    """Books of one worker: how many leading tokens of each request it has been given.

    Requests go by their ids, which are the worker's handles.
    """

    def __init__(self, model: ModelIR) -> None:
        self._code = model.code
        self._verify = model.config.verify
        self._given: dict[int, int] = {}
        self._drops: list[int] = []
        self._truncates: dict[int, int] = {}
        self._steps = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._given

    @property
    def to_drop(self) -> int:
        """How many requests the worker holds that it is to forget."""
        return len(self._drops)

    def clear(self) -> None:
        """The worker is a new one."""
        self._given.clear()
        self._drops.clear()
        self._truncates.clear()

    def drop(self, sequence: Sequence) -> None:
        """The worker is to forget a request, if it holds anything of it."""
        if self._given.pop(sequence.id, None) is not None:
            self._drops.append(sequence.id)
            self._truncates.pop(sequence.id, None)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """The worker is to forget all but the first ``length`` tokens of a request."""
        if self._given.get(sequence.id, 0) > length:
            self._given[sequence.id] = length
            self._truncates[sequence.id] = length

    def truncated(self, sequence: Sequence, length: int) -> None:
        """The worker has forgotten all but the first ``length`` tokens by itself."""
        self._given[sequence.id] = length
        self._truncates.pop(sequence.id, None)

    def step(self, batch: Iterable[Sequence]) -> Step:
        """The next step: what has changed since the last one, and ``batch`` to run."""
        opens, rows = [], []
        for sequence in batch:
            given = self._given.get(sequence.id)
            if given is None:
                given = 0
                opens.append(
                    Open(
                        sequence.id,
                        sequence.epoch,
                        sequence.prompt_tokens,
                        sequence.seed,
                        sequence.sampling,
                        sequence.params,
                        sequence.states.get(self._code, []),
                    )
                )
            rows.append(
                Row(
                    sequence.id,
                    sequence.epoch,
                    given,
                    sequence.tokens[given:],
                    sequence.run_length,
                    sequence.tentative if self._verify else 0,
                )
            )
            self._given[sequence.id] = len(sequence.tokens)
        drops, self._drops = self._drops, []
        truncates, self._truncates = list(self._truncates.items()), {}
        self._steps += 1
        return Step(self._steps, drops, opens, truncates, rows)
