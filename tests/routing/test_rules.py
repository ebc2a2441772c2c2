"""Compiled rules: which one fires in each row, and what they read."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.routing.oracle import float32, holds
from tokenflow.dsl.expr import SIGNALS, parse_condition
from tokenflow.errors import ProtocolError
from tokenflow.routing.rules import Rules, compile_rules
from tokenflow.routing.signals import Signals
from tokenflow.routing.terms import REAL_SIGNALS, WHOLE_SIGNALS
from tokenflow.wire.messages import RouteRule

PARAMS = ("alpha", "beta")
Row = dict[str, float]


class Given:
    """Signals with values chosen by a test."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        for name in WHOLE_SIGNALS:
            setattr(self, name, torch.tensor([row[name] for row in rows], dtype=torch.int64))
        self.params = {name: self.real(name) for name in PARAMS}
        for name in REAL_SIGNALS:
            setattr(self, name, lambda name=name: self.real(name))

    def real(self, name: str) -> torch.Tensor:
        return torch.tensor([row[name] for row in self.rows], dtype=torch.float32)


def row(**values: float) -> Row:
    return {**dict.fromkeys((*SIGNALS, *PARAMS), 0), **values}


def compiled(*conditions: Any) -> Rules:
    trees = (parse_condition(c, PARAMS) if isinstance(c, str) else c for c in conditions)
    return compile_rules([RouteRule(tree, 1) for tree in trees], PARAMS)


def fired(rules: Rules, *rows: Row) -> list[int]:
    chosen = rules(cast(Signals, Given(list(rows))))
    assert chosen.dtype == torch.int64
    assert chosen.shape == (len(rows),)
    return chosen.tolist()


def true(condition: str, **values: float) -> bool:
    return fired(compiled(condition), row(**values)) == [0]


def test_the_first_rule_that_fires_decides() -> None:
    rules = compiled("entropy > 0.5", "position == 3", "entropy > 0.2")
    rows = [row(entropy=0.9, position=3), row(entropy=0.3, position=3), row(entropy=0.3), row(entropy=0.1)]
    assert fired(rules, *rows) == [0, 1, 2, -1]


def test_without_rules_every_request_stays() -> None:
    assert fired(compiled(), row(), row()) == [-1, -1]


def test_a_constant_condition_fires_always_or_never() -> None:
    assert fired(compiled("true"), row(), row()) == [0, 0]
    assert fired(compiled("false"), row(), row()) == [-1, -1]
    rules = compiled("false", "entropy > 0.5", "1 < 2", "position == 0")
    assert fired(rules, row(entropy=1), row()) == [1, 2]


def test_rules_say_what_they_read() -> None:
    rules = compiled("entropy > alpha and token == 3", "max(margin, 1) > 0 or position < 2")
    assert rules.signals == {"entropy", "token", "margin", "position"}
    assert rules.params == {"alpha"}


def test_what_cannot_matter_is_not_read() -> None:
    rules = compiled("false and entropy > 0", "true or beta > 0", "margin > 0")
    assert (rules.signals, rules.params) == (frozenset(), frozenset())


def test_the_signals_of_the_language_are_those_that_are_computed() -> None:
    assert {*WHOLE_SIGNALS, *REAL_SIGNALS} == set(SIGNALS)
    for name in REAL_SIGNALS:
        assert callable(getattr(Signals, name))


def test_rules_that_crossed_the_wire_work_the_same() -> None:
    tree = parse_condition("0.25 < entropy <= alpha and not token == 3", PARAMS)
    sent = msgspec.msgpack.encode([RouteRule(tree, 2)])
    rules = compile_rules(msgspec.msgpack.decode(sent, type=tuple[RouteRule, ...]), PARAMS)
    rows = [row(entropy=0.5, alpha=0.5), row(entropy=0.5, alpha=0.5, token=3), row(entropy=0.25, alpha=0.5)]
    assert fired(rules, *rows) == fired(compiled(tree), *rows) == [0, -1, -1]


@pytest.mark.parametrize(
    ("text", "below", "equal", "above"),
    [
        ("entropy > alpha", False, False, True),
        ("entropy >= alpha", False, True, True),
        ("entropy < alpha", True, False, False),
        ("entropy <= alpha", True, True, False),
        ("entropy == alpha", False, True, False),
        ("entropy != alpha", True, False, True),
    ],
)
def test_comparisons_are_strict_or_not_as_written(text: str, below: bool, equal: bool, above: bool) -> None:
    tau = float32(0.03)
    step = 2.0**-29
    rows = [row(entropy=tau + step * delta, alpha=tau) for delta in (-1, 0, 1)]
    assert len({float32(r["entropy"]) for r in rows}) == 3
    expected = [0 if fires else -1 for fires in (below, equal, above)]
    assert fired(compiled(text), *rows) == expected
    assert fired(compiled(text.replace("alpha", "0.03")), *rows) == expected


def test_whole_numbers_compare_exactly() -> None:
    ids = [151667, 151668, 151669, 2**24, 2**24 + 1, 2**24 + 2, 2**31 - 1]
    for wanted in (151668, 2**24 + 1):
        for literal in (f"{wanted}", f"{wanted}.0"):
            rows = [row(token=i) for i in ids]
            assert fired(compiled(f"token == {literal}"), *rows) == [0 if i == wanted else -1 for i in ids]
    assert true("token - position == 1", token=2**24 + 1, position=2**24)
    assert true("token * position == 1125899906842623", token=2**25 - 1, position=2**25 + 1)
    assert not true("token > 9223372036854775807", token=2**31 - 1)
    assert true("token % 1000 == 668 and -token % 1000 == 332", token=151668)


def test_whole_numbers_become_real_where_they_could_overflow() -> None:
    assert true("token * token * token * token > 1e37", token=2**31 - 1)
    assert not true("token * token * token < 0", token=2**31 - 1)
    assert true("9223372036854775807 + token > 9e18", token=1)


def test_division_gives_real_numbers() -> None:
    assert true("position / 2 == 1.5", position=3)
    assert true("7 / 2 == 3.5")
    assert true("1 / position == 0.25", position=4)


def test_a_quotient_is_rounded_once() -> None:
    for divisor in range(1, 200):
        values = {"position": divisor, "beta": divisor, "alpha": float32(7 / divisor)}
        assert true("7 / position == alpha and 7 / beta == alpha", **values)


def test_division_by_zero_follows_ieee_754() -> None:
    assert true("1 / position > 1e38")
    assert true("-1 / position < -1e38")
    assert true("1 / 0 > 1e38 and -1 / 0 < -1e38 and 1 / -0.0 < 0")
    for nan in ("position / position", "0 / 0", "position % position", "token % 0", "3 % 0", "entropy % 0"):
        for comparison in ("<", "<=", ">", ">=", "=="):
            assert not true(f"{nan} {comparison} 0"), (nan, comparison)
        assert true(f"{nan} != 0")
        assert true(f"not {nan} == {nan}")


def test_a_remainder_has_the_sign_of_the_divisor() -> None:
    assert true("entropy % 3 == 2 and -entropy % 3 == 1 and entropy % -3 == -1", entropy=5)
    assert true("5 % 3 == 2 and -5 % 3 == 1 and 5 % -3 == -1 and 5.5 % 2 == 1.5")


def test_a_remainder_does_not_depend_on_the_batch() -> None:
    rules = compiled("entropy % alpha < 0.0561 and entropy % alpha > 0.056")
    hard = row(entropy=float32(3e38), alpha=float32(0.07956147))
    for size in (1, 7, 8, 16, 33):
        assert fired(rules, *[hard] * size) == [0] * size


def test_min_and_max_keep_the_earlier_of_equal_arguments_as_python_does() -> None:
    assert true("min(entropy, 0.5, alpha) == 0.25 and max(entropy, 0.5, alpha) == 2", entropy=0.25, alpha=2)
    assert true("min(token, 3) == 3 and max(3, token, position) == 9", token=7, position=9)
    assert true("min(3, 2.5) == 2.5 and max(1, 2, 3) == 3")
    assert true("1 / min(alpha, beta) > 0 and 1 / min(beta, alpha) < 0", alpha=0.0, beta=-0.0)
    assert true("min(alpha, 1) != 1 and min(1, alpha) == 1", alpha=math.nan)


def test_constants_are_rounded_to_float32_once_they_meet_a_signal() -> None:
    assert true("entropy == 0.1", entropy=0.1)
    assert true("entropy == 0.1 + 0.2", entropy=0.3)
    assert not true("0.1 + 0.2 == 0.3")


def test_results_do_not_depend_on_the_default_dtype_of_torch() -> None:
    text = "position / 3 > 0.33 and position * 0.1 < 0.101 and 1 / position > 0.99 and entropy * 3 > alpha"
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert true(text, position=1, entropy=0.33333334, alpha=0.9999)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (None, "not an expression: None"),
        ("entropy", "not an expression: 'entropy'"),
        ([], "not an expression: []"),
        ([3, 4], "not an expression: [3, 4]"),
        (["number", True], "unknown number ['number', True]"),
        (["number", "3"], "unknown number ['number', '3']"),
        (["signal", "entropi"], "unknown signal ['signal', 'entropi']"),
        (["signal", "__class__"], "unknown signal ['signal', '__class__']"),
        (["param", "gamma"], "unknown param ['param', 'gamma']"),
        (["head", ["number", 1]], "unknown node 'head' over 1 arguments, 0 of them conditions"),
        (["<", ["number", 1]], "unknown node '<' over 1 arguments, 0 of them conditions"),
        (["+", ["number", 1], ["boolean", True]], "unknown node '+' over 2 arguments, 1 of them conditions"),
        (["and", ["boolean", True]], "unknown node 'and' over 1 arguments, 1 of them conditions"),
        (["not", ["number", 1]], "unknown node 'not' over 1 arguments, 0 of them conditions"),
        (["min"], "unknown node 'min' over 0 arguments, 0 of them conditions"),
        (["number", 1], "a number, not a condition"),
    ],
)
def test_a_tree_that_no_recipe_makes_is_refused(tree: object, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        compile_rules([RouteRule(("boolean", False), 1), RouteRule(tree, 1)], PARAMS)
    assert str(caught.value) == f"rule 1: {message}"


LITERALS: list[float] = [0, 1, 2, 3, 7, 1000, 151668, 2**24 + 1, 2**62, 2**63 - 1]
LITERALS += [0.0, 0.03, 0.1, 0.5, 1.0, 2.0, 1e-30, 1e30, 3e38]
LEAVES = st.one_of(
    st.sampled_from(LITERALS).map(lambda x: ("number", x)),
    st.sampled_from(list(SIGNALS)).map(lambda name: ("signal", name)),
    st.sampled_from(PARAMS).map(lambda name: ("param", name)),
)


def numbers(depth: int) -> st.SearchStrategy[Any]:
    if depth == 0:
        return LEAVES
    inner = numbers(depth - 1)
    return st.one_of(
        inner,
        st.tuples(st.sampled_from(["neg", "abs"]), inner),
        st.tuples(st.sampled_from(["+", "-", "*", "/", "%", "min", "max"]), inner, inner),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner, inner),
    )


def conditions(depth: int) -> st.SearchStrategy[Any]:
    comparison = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    compared = st.tuples(comparison, numbers(2), numbers(2))
    if depth == 0:
        return st.one_of(compared, compared, compared, st.booleans().map(lambda x: ("boolean", x)))
    inner = conditions(depth - 1)
    return st.one_of(
        inner,
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner, inner),
    )


REALS = [0.0, -0.0, 0.03, 0.5, 1.0, -1.0, 2.0, 7.0, 1e-30, 3e38, math.inf, -math.inf]
WHOLES = [0, 1, 2, 3, 7, 1000, 151668, 2**24 + 1, 2**31 - 1]


def random_rows(seed: int) -> list[Row]:
    """One to 20 rows whose values often coincide with each other and with the literals."""
    source = random.Random(seed)

    def real() -> float:
        choices = (source.choice(REALS), source.random(), source.uniform(-10, 10), source.gauss(0, 1e6))
        return float32(source.choice(choices))

    def whole() -> int:
        return source.choice((source.choice(WHOLES), source.randrange(6), source.randrange(2**31)))

    return [
        {**{name: real() for name in (*REAL_SIGNALS, *PARAMS)}, **{name: whole() for name in WHOLE_SIGNALS}}
        for _ in range(source.randrange(1, 21))
    ]


@settings(max_examples=500, deadline=None)
@given(conditions(2), st.integers(0, 2**32))
def test_random_expressions_evaluate_as_in_plain_python(tree: tuple[object, ...], seed: int) -> None:
    batch = random_rows(seed)
    assert fired(compiled(tree), *batch) == [0 if holds(tree, r) else -1 for r in batch]


def text_of(tree: Any) -> str:
    node, *arguments = tree
    if node in ("number", "signal", "param"):
        return str(arguments[0])
    if node == "boolean":
        return "true" if arguments[0] else "false"
    inner = [text_of(argument) for argument in arguments]
    if node in ("min", "max", "abs"):
        return f"{node}({', '.join(inner)})"
    if node in ("neg", "not"):
        return f"({'-' if node == 'neg' else 'not '}{inner[0]})"
    return f"({f' {node} '.join(inner)})"


def flat(tree: Any) -> Iterator[Any]:
    yield tree
    for argument in tree[1:]:
        if isinstance(argument, tuple):
            yield from flat(argument)


@settings(max_examples=150, deadline=None)
@given(conditions(2))
def test_a_tree_written_out_is_read_back_as_it_was(tree: tuple[object, ...]) -> None:
    text = text_of(tree)
    if len(text) <= 2000:
        read = parse_condition(text, PARAMS)
        assert list(flat(read)) == list(flat(tree))


pieces = st.lists(
    st.tuples(
        st.sampled_from(["", "-", "not "]),
        st.integers(0, 9),
        st.sampled_from(["+", "-", "*", "/", "%", "<", "<=", ">", "==", "!=", "and", "or"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=500, deadline=None)
@given(pieces)
def test_operators_bind_as_in_python(parts: list[tuple[str, int, str]]) -> None:
    text = " ".join(f"{sign}{number} {symbol}" for sign, number, symbol in parts) + " 5"
    try:
        tree = parse_condition(text)
    except Exception as error:
        assert type(error).__name__ == "ExpressionError"
        return
    try:
        expected = eval(text)
    except ZeroDivisionError:
        return
    assert fired(compiled(tree), row()) == [0 if expected else -1]
