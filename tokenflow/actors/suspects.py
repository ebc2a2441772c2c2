"""Requests that were there when workers died: whether one of them is what they died of."""

from __future__ import annotations

from collections.abc import Iterable

from tokenflow.actors.sequence import Sequence
from tokenflow.errors import DeadlyRequest, TokenflowError

_SUSPICIOUS, DEADLY = 2, 4
"""A request during which so many workers died in a row runs alone; at so many it is what they die of."""
_STEPS_BETWEEN = 16
"""Steps that a new worker runs for all others, if there are any, before a suspect gets to it."""


def isolate(batch: Iterable[Sequence], steps: int) -> tuple[list[Sequence], list[Sequence]]:
    """Who of those that are ready runs now, and who waits.

    Suspects run alone, one after the other, those with the fewest deaths first: whoever only was there gets
    its step, and is none any more.  However many of them kill a worker, in between all others go on.

    :param steps: how many the worker has completed.
    """
    ready = list(batch)
    suspects = [sequence for sequence in ready if sequence.deaths >= _SUSPICIOUS]
    if not suspects:
        return ready, []
    others = [sequence for sequence in ready if sequence.deaths < _SUSPICIOUS]
    if others and steps < _STEPS_BETWEEN:
        return others, suspects
    alone = min(suspects, key=lambda sequence: sequence.deaths)
    return [alone], [sequence for sequence in ready if sequence is not alone]


def deadly(sequence: Sequence, model: str, error: TokenflowError) -> DeadlyRequest:
    """Worker after worker died while it ran this request alone; ``error`` is the last one's."""
    return DeadlyRequest(
        f"{sequence.deaths} workers of model {model!r} in a row died while they ran this request at output "
        f"position {sequence.output_tokens}; the last: {error}"
    )
