"""What workers hold of requests, looked at after every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from tokenflow.wire.messages import Step, StepDone
from tokenflow.worker.model import ModelWorker


class Held(NamedTuple):
    """The tokens that the worker of a model held of a request when it sampled the one after them."""

    model: int
    tokens: list[int]


@contextmanager
def watched() -> Iterator[list[Held]]:
    """Note what workers in threads hold, over toy engines.

    A worker fails if its KV cache is not as long as what it fed, what it fed is not what it was given, or the
    engine has a slot for a request that is gone.
    """
    held: list[Held] = []
    original = ModelWorker.run

    def watching(self: Any, step: Step) -> StepDone:
        done = original(self, step)
        residents = self._residents._by_handle
        assert {r.slot for r in residents.values() if r.slot >= 0} == self.engine._slots.keys()
        for resident in residents.values():
            assert resident.slot < 0 or self.engine._slots[resident.slot] == resident.tokens[: resident.fed]
        for row in done.rows:
            resident = residents[row.handle]
            assert row.position == resident.fed
            if row.token >= 0:
                assert resident.fed == len(resident.tokens)
                held.append(Held(self._hello.code, list(resident.tokens)))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelWorker, "run", watching)
        yield held
