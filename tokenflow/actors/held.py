"""What a model's worker holds of each request, and what the next step tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tokenflow.actors.sequence import Sequence
from tokenflow.dsl.ir import ModelIR
from tokenflow.wire.ahead import next_step
from tokenflow.wire.messages import Open, Row, Step, StepDone


class Held:
    """Books of one worker: how many leading tokens of each request it has been given.

    Requests go by their ids, which are the worker's handles.  A request that is dropped is still there until
    the worker has answered the step that says so.  ``steps`` counts the steps.
    """

    def __init__(self, model: ModelIR) -> None:
        self._code = model.code
        self._verify = model.config.verify
        self._given: dict[int, int] = {}
        self._drops: list[int] = []
        self._leaving: frozenset[int] = frozenset()
        self._left = asyncio.Event()
        self._truncates: dict[int, int] = {}
        self.steps = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._given

    @property
    def to_drop(self) -> int:
        """How many requests the worker holds that it is to forget."""
        return len(self._drops)

    def clear(self) -> None:
        """The worker is gone, and with it all that it held."""
        self._given.clear()
        self._drops.clear()
        self._truncates.clear()
        self.answered()

    def answered(self) -> None:
        """The worker has done what the last step said."""
        self._leaving = frozenset()
        self._left.set()
        self._left.clear()

    async def gone(self, sequence: Sequence) -> None:
        """Wait until the worker holds nothing of a request that was dropped."""
        while sequence.id in self._drops or sequence.id in self._leaving:
            await self._left.wait()

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

    def step(
        self, batch: Iterable[Sequence], least: int = 0, ahead: Mapping[int, int] = MappingProxyType({})
    ) -> Step:
        """The next step: what has changed since the last one, and ``batch`` to run.

        :param least: with how many requests the worker may go on by itself; 0 for not at all.
        :param ahead: in how many further steps it may run a request so, by id.
        """
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
                        sequence.states.get(self._code, ()),
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
                    ahead.get(sequence.id, 0),
                )
            )
            self._given[sequence.id] = len(sequence.tokens)
        drops, self._drops = self._drops, []
        self._leaving = frozenset(drops)
        truncates, self._truncates = list(self._truncates.items()), {}
        self.steps += 1
        return Step(self.steps, drops, opens, truncates, rows, least)

    def went_on(self, step: Step, done: StepDone) -> Step:
        """The step that the worker has begun by itself; it gave itself the tokens that it sampled."""
        self.steps += 1
        following = next_step(step, done, done.ahead)
        for row in following.rows:
            if row.handle in self._given:
                self._given[row.handle] = row.base + 1
        return following
