"""The step that a worker begins by itself: both sides know it without a frame."""

from __future__ import annotations

from collections.abc import Collection

from tokenflow.wire.messages import Row, Step, StepDone


def next_step(step: Step, done: StepDone, handles: Collection[int]) -> Step:
    """The step after ``step`` that goes on with ``handles``, each extended by the token just sampled.

    :param handles: rows of ``done`` whose tokens stay with the model.
    """
    before = {row.handle: row for row in step.rows}
    rows = [
        Row(
            row.handle,
            row.epoch,
            row.position,
            [row.token],
            before[row.handle].run_length + 1,
            ahead=before[row.handle].ahead - 1,
        )
        for row in done.rows
        if row.handle in handles
    ]
    return Step(step.id + 1, [], [], [], rows, step.least)
