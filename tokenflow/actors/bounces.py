"""Requests that the recipe leads nowhere: hand-offs that fail, or that would go to and fro for ever."""

from __future__ import annotations

from tokenflow.actors.sequence import Sequence
from tokenflow.dsl.ir import RecipeIR
from tokenflow.errors import RouteFailed


def handoff_failed(sequence: Sequence, steps: int, error: RouteFailed) -> RouteFailed:
    """A recipe's own ``send`` or ``receive`` failed, after so many steps of its model."""
    return RouteFailed(f"{error} (at output position {sequence.output_tokens}, step {steps} of the model)")


def livelock(recipe: RecipeIR, sequence: Sequence, sender: int, to: int) -> RouteFailed:
    """Model ``sender`` hands a position over to one that has given it up before; both are model codes."""
    names = [model.name for model in recipe.models]
    return RouteFailed(
        f"recipe {recipe.name!r}: model {names[sender - 1]!r} hands output position "
        f"{sequence.output_tokens} to {names[to - 1]!r}, which already gave that position up: the "
        "request would bounce for ever; one of their rules must send: keep"
    )


def no_progress(recipe: RecipeIR, sequence: Sequence, model: str) -> RouteFailed:
    """Tokens are written and taken back, and none becomes final."""
    return RouteFailed(
        f"recipe {recipe.name!r}: model {model!r} takes tokens back at output position "
        f"{sequence.output_tokens}, and {sequence.taken_back} were since one last became final: the "
        "request would bounce for ever; it must take back less than is written in between"
    )
