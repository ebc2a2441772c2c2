"""Where a step of an output ends: at any of some sequences of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import cast

from tokenflow.dsl.ir import RecipeIR


class StepEnd:
    """The end of a step.

    :param sequences: token ids that end it, any of which will do.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        ordered = sorted((tuple(sequence) for sequence in sequences), key=len)
        self._by_length = {length: frozenset(some) for length, some in groupby(ordered, len)}

    def reached(self, tokens: list[int], start: int, end: int) -> bool:
        """Whether ``tokens[start:end]`` ends in one of the sequences."""
        return any(
            length <= end - start and tuple(tokens[end - length : end]) in some
            for length, some in self._by_length.items()
        )


def step_end(recipe: RecipeIR) -> StepEnd | None:
    """Where a step of a recipe's outputs ends, if it says so; the recipe's texts are token ids by now."""
    if recipe.rollback_to is None:
        return None
    return StepEnd(cast("Iterable[Sequence[int]]", recipe.rollback_to[1]))
