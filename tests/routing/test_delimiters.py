"""Conditions on where the output ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.routing.test_rules import Given, compiled, row
from tokenflow.routing.signals import Signals

MIXED = ((9,), (8,), (1, 2), (3, 3, 3))


def holds(node: str, output: Sequence[int], sequences: Any = MIXED, extra: int = 0) -> bool:
    """Whether the condition holds with the last token of the output just sampled."""
    rules = compiled((node, sequences))
    *before, token = output
    signals = Given([row(token=token)], [before], rules.tail + extra)
    return rules(signals) == [0]


@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([9], True),
        ([8], True),
        ([7], False),
        ([1, 2], True),
        ([2], False),
        ([5, 1, 2], True),
        ([1, 5, 2], False),
        ([2, 1], False),
        ([3, 3, 3], True),
        ([3, 3], False),
        ([3, 3, 3, 3], True),
        ([9, 1], False),
    ],
)
def test_at_holds_where_the_output_has_just_reached_a_sequence(
    output: list[int], expected: bool, extra: int
) -> None:
    assert holds("at", output, extra=extra) is expected


@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], True),
        ([9], True),
        ([7], False),
        ([2], False),
        ([1, 2], True),
        ([1, 2, 7], False),
        ([3, 3], False),
        ([7, 3, 3, 3], True),
        ([8, 0], False),
    ],
)
@pytest.mark.parametrize("token", [0, 9])
def test_follows_holds_after_a_sequence_and_at_the_beginning(
    before: list[int], token: int, expected: bool, extra: int
) -> None:
    assert holds("follows", [*before, token], extra=extra) is expected


def test_sequences_of_one_length_alone_work() -> None:
    assert holds("at", [4, 5], ((4, 5),))
    assert not holds("at", [5, 5], ((4, 5),))
    assert holds("at", [5], ((5,),))
    assert holds("follows", [4, 5, 0], ((4, 5),))
    assert not holds("follows", [4, 0], ((4, 5),))


def test_each_row_has_its_own_output() -> None:
    rules = compiled(("at", MIXED), ("follows", MIXED))
    rows = [row(token=2), row(token=2), row(token=9), row(token=5)]
    assert rules(Given(rows, [[1], [8], [], []], rules.tail)) == [0, 1, 0, 1]


def test_lists_as_they_come_off_the_wire_work_as_tuples_do() -> None:
    assert holds("at", [1, 2], [[9], [1, 2]])


def test_texts_need_no_logits() -> None:
    rules = compiled(("or", ("at", ((1, 2),)), ("follows", ((3,),))))
    signals = Signals(torch.empty(2, 0), torch.tensor([2, 2]), tails=torch.tensor([[1], [3]]))
    assert rules(signals) == [0, 0]


def test_latest_tokens_that_were_left_out_are_missed_when_read() -> None:
    with pytest.raises(LookupError, match="the latest tokens of the rows were not given"):
        compiled(("follows", ((1,),)))(Signals(torch.zeros(1, 2), torch.tensor([0])))
