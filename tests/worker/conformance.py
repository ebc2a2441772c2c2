"""The conversation between router and worker as tests: derive and give a ``worker`` fixture.

They hold for a worker that runs a model on any engine, and for one that runs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tokenflow.errors import ProtocolError
from tokenflow.types import SamplingParams
from tokenflow.wire.messages import Open, Row, RowDone, Step, StepDone
from tokenflow.worker.loop import Worker

PROMPT = [1, 2, 3]


def opened(handle: int = 1, seed: int = 7, epoch: int = 0) -> Open:
    """A request whose first three tokens are its prompt."""
    return Open(handle, epoch, len(PROMPT), seed, SamplingParams(), ())


def run(
    worker: Worker,
    *rows: Row,
    opens: Sequence[Open] = (),
    drop: Sequence[int] = (),
    truncate: Sequence[tuple[int, int]] = (),
) -> StepDone:
    """One step, to its end."""
    with worker.mode:
        done = worker.run(Step(1, list(drop), list(opens), list(truncate), list(rows)))
    assert isinstance(done, StepDone)
    worker.wait()
    return done


def prompt(handle: int = 1, epoch: int = 0) -> Row:
    """The first row of a request."""
    return Row(handle, epoch, 0, PROMPT, 0)


class WorkerConformance:
    """See the module."""

    @pytest.fixture
    def worker(self) -> Worker:
        raise NotImplementedError("override this fixture with a worker that knows ids up to 100")

    def test_every_row_is_answered_where_it_stands(self, worker: Worker) -> None:
        first = run(worker, prompt(1), prompt(2, 5), opens=[opened(1), opened(2, epoch=5)])
        assert [(row.handle, row.epoch, row.position) for row in first.rows] == [(1, 0, 3), (2, 5, 3)]
        second = run(worker, Row(2, 5, 3, [4, 5], 1), Row(1, 0, 3, [9], 1))
        assert [(row.handle, row.epoch, row.position) for row in second.rows] == [(2, 5, 5), (1, 0, 4)]
        assert [first.computed, second.computed] == [6, 3]
        assert all(row.token >= 0 for row in (*first.rows, *second.rows))
        assert not first.failed and not second.failed

    def test_a_step_may_say_something_without_asking_for_anything(self, worker: Worker) -> None:
        done = run(worker, opens=[opened()])
        assert (done.rows, done.failed, done.computed) == ([], [], 0)
        assert [row.position for row in run(worker, prompt()).rows] == [3]

    def test_a_request_that_stays_away_goes_on_where_it_was(self, worker: Worker) -> None:
        """What the others do meanwhile is nothing to it, and only what is new is computed."""
        run(worker, prompt(1), prompt(2), opens=[opened(1), opened(2)])
        for position in range(3, 8):
            run(worker, Row(2, 0, position, [7], 1))
        back = run(worker, Row(1, 0, 3, [4, 5, 6], 0))
        assert ([row.position for row in back.rows], back.computed) == ([6], 3)

    @pytest.mark.parametrize(
        "wrong",
        [Row(1, 0, 2, [4], 0), Row(1, 0, 4, [4], 0), Row(1, 1, 3, [4], 0), Row(9, 0, 0, [4], 0)],
        ids=["before", "beyond", "another epoch", "unknown"],
    )
    def test_a_row_that_does_not_continue_what_is_held_is_refused(self, worker: Worker, wrong: Row) -> None:
        run(worker, prompt(), opens=[opened()])
        with pytest.raises(ProtocolError, match=r"does not continue|is not open"):
            run(worker, wrong)

    def test_tokens_are_taken_back(self, worker: Worker) -> None:
        run(worker, prompt(), opens=[opened()])
        run(worker, Row(1, 0, 3, [4, 5, 6], 0))
        done = run(worker, Row(1, 0, 4, [9], 0), truncate=[(1, 4)])
        assert [row.position for row in done.rows] == [5]

    @pytest.mark.parametrize(("handle", "length"), [(1, 4), (1, -1), (9, 0)])
    def test_what_is_not_there_cannot_be_taken_back(self, worker: Worker, handle: int, length: int) -> None:
        run(worker, prompt(), opens=[opened()])
        with pytest.raises(ProtocolError, match=r"cannot keep|is not open"):
            run(worker, truncate=[(handle, length)])

    def test_a_dropped_request_is_gone_and_its_handle_can_be_opened_again(self, worker: Worker) -> None:
        run(worker, prompt(), opens=[opened()])
        run(worker, drop=[1])
        run(worker, drop=[1])
        with pytest.raises(ProtocolError, match=r"does not continue|is not open"):
            run(worker, Row(1, 0, 3, [4], 0))
        run(worker, prompt(1, 1), opens=[opened(epoch=1)])
        done = run(worker, prompt(1, 2), drop=[1], opens=[opened(epoch=2)])
        assert [(row.epoch, row.position) for row in done.rows] == [(2, 3)]

    def test_a_seed_gives_the_same_tokens_alone_in_company_and_after_a_loss(self, worker: Worker) -> None:
        def written(company: int) -> list[RowDone]:
            others = range(2, 2 + company)
            opens = [*(opened(other, seed=other) for other in others), opened()]
            found = []
            for position in range(3, 9):
                tokens = PROMPT if position == 3 else [position]
                base = position - len(tokens)
                rows = [Row(open.handle, 0, base, tokens, 0) for open in opens]
                done = run(worker, *rows, opens=opens if position == 3 else ())
                found += [row for row in done.rows if row.handle == 1]
            return found

        alone = written(company=0)
        assert written(company=3) == alone
        whole = Row(1, 0, 0, [*PROMPT, *range(4, 9)], 0)
        assert run(worker, whole, drop=[1], opens=[opened()]).rows == alone[-1:]
