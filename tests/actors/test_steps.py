"""Where a step ends."""

from __future__ import annotations

import pytest

from tokenflow.actors.steps import StepEnd

END = StepEnd([[9], (1, 2), (8,), (3, 3, 3)])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        ([9], True),
        ([8], True),
        ([2], False),
        ([1, 2], True),
        ([5, 1, 2], True),
        ([1, 5, 2], False),
        ([3, 3], False),
        ([3, 3, 3], True),
        ([9, 1], False),
    ],
)
def test_a_step_ends_in_any_of_its_sequences(tokens: list[int], expected: bool) -> None:
    assert END.reached(tokens, 0, len(tokens)) is expected
    assert END.reached([7, *tokens, 9, 1], 1, 1 + len(tokens)) is expected


def test_what_stands_before_the_output_does_not_count() -> None:
    assert not END.reached([1, 2], 1, 2)
    assert not END.reached([9], 1, 1)
