"""Trees: written out and read back, walked and changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from tests.trees import HEADS, PARAMS, TEXTS, conditions
from tokenflow.dsl.expr import parse_condition
from tokenflow.dsl.tree import rewrite, walk, write

A, B, C = ("param", "a"), ("param", "b"), ("param", "c")
X, Y, Z = (("<", param, ("number", 1)) for param in (A, B, C))


def flat(tree: Any) -> Iterator[Any]:
    """All there is in a tree, with types: 1, 1.0 and True are equal."""
    for part in tree:
        yield from flat(part) if isinstance(part, tuple) else [(type(part), part)]


@settings(max_examples=300, deadline=None)
@given(conditions(2, TEXTS))
def test_a_tree_written_out_is_read_back_as_it_was(tree: tuple[object, ...]) -> None:
    text = write(tree)
    if len(text) <= 2000:
        assert list(flat(parse_condition(text, PARAMS, HEADS))) == list(flat(tree))


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (("+", ("+", A, B), C), "a + b + c"),
        (("+", A, ("+", B, C)), "a + (b + c)"),
        (("-", ("*", A, B), ("/", ("+", A, B), C)), "a * b - (a + b) / c"),
        (("%", ("neg", A), ("neg", ("neg", B))), "-a % --b"),
        (("neg", ("*", A, B)), "-(a * b)"),
        (("max", ("neg", A), ("number", 1.5), B), "max(-a, 1.5, b)"),
        (("and", X, ("or", Y, Z)), "a < 1 and (b < 1 or c < 1)"),
        (("or", ("and", X, Y), Z), "a < 1 and b < 1 or c < 1"),
        (("and", ("and", X, Y), Z), "(a < 1 and b < 1) and c < 1"),
        (("not", ("not", X)), "not not a < 1"),
        (("not", ("and", X, Y)), "not (a < 1 and b < 1)"),
        (("and", ("not", X), ("boolean", True)), "not a < 1 and true"),
        (("window", ("bool", ("or", X, Y)), 3), "window(a < 1 or b < 1, 3)"),
        (("momentum", ("-", A, B), 0.7), "momentum(a - b, 0.7)"),
        (("at", 'a"\n\\é'), r'at("a\"\n\\é")'),
        ((">=", ("head", "r2r"), ("threshold", "r2r")), 'head("r2r") >= threshold("r2r")'),
    ],
)
def test_brackets_stand_only_where_they_are_needed(tree: tuple[object, ...], text: str) -> None:
    assert write(tree) == text


def test_walking_a_tree_meets_every_part_once_and_nothing_inside_leaves() -> None:
    tree = ("and", ("at", ((1, 2), (3,))), ("<", ("window", ("bool", X), 3), ("number", 1)))
    assert list(walk(tree)) == [
        tree,
        ("at", ((1, 2), (3,))),
        tree[2],
        ("window", ("bool", X), 3),
        ("bool", X),
        X,
        A,
        ("number", 1),
        ("number", 1),
    ]


def test_rewriting_changes_leaves_wherever_they_are() -> None:
    def change(leaf: tuple[object, ...]) -> tuple[object, ...]:
        return C if leaf == A else leaf

    tree = ("or", X, ("not", ("<", ("momentum", ("bool", ("at", "x")), 0.5), ("neg", A))))
    assert rewrite(tree, change) == (
        "or",
        Z,
        ("not", ("<", ("momentum", ("bool", ("at", "x")), 0.5), ("neg", C))),
    )
