"""Tokens that are made when they are looked at are a tuple to whoever looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.types import Logprob, Token
from tokenflow.written import Written

ROWS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.text(max_size=2),
        st.sampled_from(["slm", "llm"]),
        st.none() | st.floats(-9, 0),
        st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0)), max_size=2),
    ),
    max_size=6,
)
BOUNDS = st.none() | st.integers(-8, 8)


@given(rows=ROWS, start=BOUNDS, stop=BOUNDS)
def test_they_are_counted_listed_sliced_and_compared_as_a_tuple(
    rows: list[tuple[int, str, str, float | None, list[tuple[int, float]]]],
    start: int | None,
    stop: int | None,
) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], [], []]
    written = Written(*columns)
    expected = tuple(
        Token(token, text, model, logprob, tuple(Logprob(*pair) for pair in top))
        for token, text, model, logprob, top in rows
    )
    assert tuple(written) == expected
    assert len(written) == len(expected)
    assert written[start:stop] == expected[start:stop]
    assert written == expected and expected == written
    assert written != (*expected, Token(0, "", "slm"))
    assert hash(written) == hash(expected)
    assert repr(written) == repr(expected)
    for index in range(-len(expected), len(expected)):
        assert written[index] == expected[index]
    with pytest.raises(IndexError):
        written[len(expected)]
