"""Random well-typed expression trees."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from tokenflow.dsl.expr import SIGNALS

PARAMS = ("alpha", "beta")
HEADS = ("r2r", "other")
LITERALS: list[float] = [0, 1, 2, 3, 7, 1000, 151668, 2**24 + 1, 2**62, 2**63 - 1]
LITERALS += [0.0, 0.03, 0.1, 0.5, 1.0, 2.0, 1e-30, 1e30, 3e38]
LEAVES = st.one_of(
    st.sampled_from(LITERALS).map(lambda x: ("number", x)),
    st.sampled_from(list(SIGNALS)).map(lambda name: ("signal", name)),
    st.sampled_from(PARAMS).map(lambda name: ("param", name)),
    st.tuples(st.sampled_from(["head", "threshold"]), st.sampled_from(HEADS)),
)
SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)
IDS = SEQUENCES.map(tuple)
TEXTS = st.text(st.sampled_from("ab\n\t\"'\\({,é🙂\x07\u2028"), min_size=1, max_size=4)


@cache
def numbers(depth: int, places: st.SearchStrategy[Any], steps: bool = True) -> st.SearchStrategy[Any]:
    """Numbers; ``places`` are what ``at`` and ``follows`` are of, ``steps`` allows windows and momentums."""
    if depth == 0:
        return LEAVES
    inner = numbers(depth - 1, places, steps)
    parts = [
        inner,
        st.tuples(st.sampled_from(["neg", "abs"]), inner),
        st.tuples(st.sampled_from(["+", "-", "*", "/", "%", "min", "max"]), inner, inner),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner, inner),
    ]
    if steps:
        of = st.one_of(
            numbers(depth - 1, places, steps=False),
            st.tuples(st.just("bool"), conditions(depth - 1, places, steps=False)),
        )
        parts += [
            st.tuples(st.just("window"), of, st.integers(1, 4)),
            st.tuples(st.just("momentum"), of, st.sampled_from([0.0, 0.3, 0.7, 0.99])),
        ]
    return st.one_of(parts)


@cache
def conditions(depth: int, places: st.SearchStrategy[Any], steps: bool = True) -> st.SearchStrategy[Any]:
    """Conditions, as for :func:`numbers`."""
    comparison = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    compared = st.tuples(
        comparison, numbers(min(depth, 1) + 1, places, steps), numbers(min(depth, 1) + 1, places, steps)
    )
    place = st.tuples(st.sampled_from(["at", "follows"]), places)
    if depth == 0:
        return st.one_of(compared, compared, compared, place, st.booleans().map(lambda x: ("boolean", x)))
    inner = conditions(depth - 1, places, steps)
    return st.one_of(
        inner,
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner, inner),
    )
