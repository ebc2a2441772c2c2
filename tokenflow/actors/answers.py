"""What a worker may answer to a step."""

from __future__ import annotations

from collections.abc import Mapping

from tokenflow.actors.sequence import Sequence
from tokenflow.dsl.ir import ModelIR, RecipeIR
from tokenflow.errors import ProtocolError
from tokenflow.wire.messages import Step, StepDone


def check_answer(
    model: ModelIR, recipe: RecipeIR, batch: Mapping[int, Sequence], step: Step, done: StepDone
) -> None:
    """A worker answers each row once, and leads nowhere else than to a model of the recipe.

    It samples at the end of a request, or where it takes back tokens that it was to check; and it goes on by
    itself with nothing but what stays.

    :param batch: the requests that were asked for, by id; of some the step no longer holds.
    :raises ProtocolError: if the answer is none.
    """
    asked = [(row.handle, row.epoch) for row in step.rows]
    answered = [(row.handle, row.epoch) for row in done.rows]
    answered += [(row.handle, row.epoch) for row in done.failed]
    if len(asked) != len(answered) or set(asked) != set(answered):
        raise ProtocolError(f"model {model.name!r} was asked for {asked}, answered {answered}")
    for row in done.rows:
        if not 0 <= row.destination <= len(recipe.models):
            raise ProtocolError(f"model {model.name!r} leads to model {row.destination}")
        sequence = batch[row.handle]
        if row.token < 0 or not sequence.runs(model.code, row.epoch):
            continue
        length = len(sequence.tokens)
        if not 0 <= length - row.position <= (sequence.tentative if model.config.verify else 0):
            raise ProtocolError(
                f"model {model.name!r} sampled position {row.position} of a request with {length} "
                f"tokens, of which {sequence.tentative} are tentative"
            )
    if done.ahead:
        may = {row.handle for row in step.rows if row.ahead > 0}
        stay = {row.handle for row in done.rows if row.token >= 0 and not row.destination}
        if not step.least or not may & stay >= set(done.ahead):
            raise ProtocolError(f"model {model.name!r} goes on by itself with {done.ahead}, which it may not")
