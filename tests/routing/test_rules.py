"""Compiled rules: which one fires in each row, and what they read."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.routing.oracle import Step, float32, holds
from tests.trees import HEADS, IDS, PARAMS, conditions
from tokenflow.dsl.expr import SIGNALS, parse_condition
from tokenflow.errors import ProtocolError
from tokenflow.routing.memory import Memories
from tokenflow.routing.rules import Rules, compile_rules
from tokenflow.routing.signals import Signals
from tokenflow.routing.trees import DOUBLE_SIGNALS, REAL_SIGNALS, WHOLE_SIGNALS
from tokenflow.wire.messages import RouteRule

Row = dict[str, float]
THRESHOLDS = {"r2r": 0.4, "other": float32(0.7)}


class Head:
    """A router head whose score is one column of the hidden states."""

    def __init__(self, column: int, threshold: float | None) -> None:
        self.column = column
        self.threshold = threshold

    def score(self, hidden: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[0] == tokens.shape[0] == hidden.shape[0]
        return hidden[:, self.column]


HEADS_OF_MODEL = {name: Head(column, THRESHOLDS[name]) for column, name in enumerate(HEADS)}


class Given(Signals):
    """Signals with values chosen by a test."""

    def __init__(
        self,
        rows: Sequence[Row],
        outputs: Sequence[Sequence[int]] = (),
        tail: int = 0,
        state: Sequence[list[float]] | None = None,
    ) -> None:
        self.rows = rows
        tails = [[*[-1] * tail, *output][len(output) :] for output in outputs or [()] * len(rows)]
        super().__init__(
            logits=torch.zeros(len(rows), 2),
            tokens=self.of("token", torch.int64),
            positions=self.of("position", torch.int64),
            run_lengths=self.of("run_length", torch.int64),
            params={name: self.of(name) for name in PARAMS},
            draws=self.of("draw", torch.float64),
            hidden=torch.stack([self.of(f"head {name}") for name in HEADS], 1),
            tails=torch.tensor(tails, dtype=torch.int64),
            state=state,
        )
        for name in REAL_SIGNALS:
            setattr(self, name, lambda name=name: self.of(name))

    def of(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([row[name] for row in self.rows], dtype=dtype)


NAMES = (*SIGNALS, *PARAMS, *(f"head {name}" for name in HEADS))


def row(**values: float) -> Row:
    return {**dict.fromkeys(NAMES, 0), **values}


def compiled(*conditions: Any) -> Rules:
    trees = (parse_condition(c, PARAMS, HEADS) if isinstance(c, str) else c for c in conditions)
    return compile_rules([RouteRule(tree, 1) for tree in trees], PARAMS, HEADS_OF_MODEL)


def fired(rules: Rules, *rows: Row) -> list[int]:
    chosen = rules(Given(rows, tail=rules.tail, state=blank(rules, len(rows))))
    assert len(chosen) == len(rows)
    return chosen


def blank(rules: Rules, count: int) -> list[list[float]]:
    return [[0.0] * rules.memories.width for _ in range(count)]


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


def test_rules_say_how_far_they_look_back_and_what_they_keep() -> None:
    rules = compiled(
        'head("r2r") > threshold("other") or draw < 0.5',
        ("or", ("at", ((1, 2, 3), (4,))), ("follows", ((5, 6),))),
        "window(margin > alpha, 3) > momentum(entropy, 0.5)",
    )
    assert (rules.tail, rules.memories.width) == (2, 4)


@pytest.mark.parametrize(
    ("tree", "tail"),
    [
        (("at", ((1,),)), 0),
        (("at", ((1,), (1, 2))), 1),
        (("at", ((1, 2, 3), (1, 2))), 2),
        (("follows", ((1,),)), 1),
        (("follows", ((1, 2, 3), (1, 2))), 3),
        (("and", ("at", ((1, 2),)), ("follows", ((1, 2),))), 2),
    ],
)
def test_rules_say_how_far_they_look_back(tree: Any, tail: int) -> None:
    assert compiled(tree).tail == tail


def test_what_cannot_matter_is_not_read() -> None:
    rules = compiled(
        'false and (entropy > 0 or window(margin, 3) > head("r2r"))',
        ("or", ("boolean", True), ("follows", ((1, 2),))),
        "momentum(beta, 0.5) > 0",
    )
    assert (rules.tail, rules.memories) == (0, Memories((), 0))
    assert rules(Signals(torch.zeros(2, 0))) == [1, 1]


def test_the_signals_of_the_language_are_those_that_are_computed() -> None:
    assert {*WHOLE_SIGNALS, *REAL_SIGNALS, *DOUBLE_SIGNALS} == set(SIGNALS)
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
    assert true("draw < 0.1 and not draw < -0.1", draw=math.nextafter(0.1, 0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "text",
    [
        "0.1 + 0.2 == 0.3",
        "3e38 * 10 / 3e38 > 1e38",
        "3e38 * 10 - 3e38 * 10 == 0",
        "1e-30 * 1e-30 == 0",
        "16777216.0 + 1.5 == 16777218",
        "min(0.1, 0.5) == 0.1",
        "5.5 % 0.1 < 0.1",
        "1 / 0 > 3e38",
        "7 / 3 * 3 == 7",
        "9223372036854775807 + 1 > 9e18",
    ],
)
def test_constants_give_what_the_same_numbers_give_in_a_step(text: str) -> None:
    """Each number in turn is a parameter."""
    alone = true(text)
    for match in re.finditer(r"[0-9.]+(e-?[0-9]+)?", text):
        if "." in match[0] or "e" in match[0]:
            written = f"{text[: match.start()]}alpha{text[match.end() :]}"
            assert true(written, alpha=float32(float(match[0]))) == alone, written


@pytest.mark.filterwarnings("error")
def test_a_window_over_what_no_float32_holds_is_infinite_without_a_warning() -> None:
    for of in ("window(draw * 3e38 * 3e38, 2)", "momentum(draw * 3e38 * 3e38, 0.5)"):
        assert true(f"{of} > 3e38", draw=0.5)


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
        (["head", "r3r"], "unknown head ['head', 'r3r']"),
        (["threshold", ["number", 1]], "unknown threshold ['threshold', ['number', 1]]"),
        (["at", "\n"], "unknown at ['at', '\\n']"),
        (["at", []], "unknown at ['at', []]"),
        (["at", [[]]], "unknown at ['at', [[]]]"),
        (["follows", [[1, -1]]], "unknown follows ['follows', [[1, -1]]]"),
        (["window", ["number", 1], 0], "unknown window ['window', ['number', 1], 0]"),
        (["window", ["number", 1], 65], "unknown window ['window', ['number', 1], 65]"),
        (["momentum", ["number", 1], 1], "unknown momentum ['momentum', ['number', 1], 1]"),
        (["momentum", ["boolean", True], 0.5], "'momentum' needs a number that depends on this step only"),
        (
            ["window", ["momentum", ["signal", "entropy"], 0.5], 2],
            "'window' needs a number that depends on this step only",
        ),
        (["bool", ["number", 1]], "unknown node 'bool' over 1 arguments, 0 of them conditions"),
        (["square", ["number", 1]], "unknown node 'square' over 1 arguments, 0 of them conditions"),
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


REALS = [0.0, -0.0, 0.03, 0.5, 1.0, -1.0, 2.0, 7.0, 1e-30, 3e38, math.inf, -math.inf]
WHOLES = [0, 1, 2, 3, 7, 1000, 151668, 2**24 + 1, 2**31 - 1]


def random_row(source: random.Random) -> Row:
    """A row whose values often coincide with each other and with the literals."""

    def real() -> float:
        choices = (source.choice(REALS), source.random(), source.uniform(-10, 10), source.gauss(0, 1e6))
        return float32(source.choice(choices))

    def whole() -> int:
        return source.choice((source.choice(WHOLES), source.randrange(4), source.randrange(2**31)))

    return {
        **{name: real() for name in NAMES},
        **{name: whole() for name in WHOLE_SIGNALS},
        "draw": source.choice((source.random(), 0.0, 0.5)),
    }


def oracle_step(row: Row, output: Sequence[int] = (), earlier: Sequence[Step] = ()) -> Step:
    return Step(
        {**row, **{f"threshold {name}": value for name, value in THRESHOLDS.items()}}, output, earlier
    )


@settings(max_examples=400, deadline=None)
@given(conditions(2, IDS), st.integers(0, 2**32))
def test_random_expressions_evaluate_as_in_plain_python(tree: tuple[object, ...], seed: int) -> None:
    source = random.Random(seed)
    batch = [random_row(source) for _ in range(source.randrange(1, 21))]
    assert fired(compiled(tree), *batch) == [0 if holds(tree, oracle_step(r)) else -1 for r in batch]


def same(left: list[float], right: list[float]) -> bool:
    return str(left) == str(right)


@settings(max_examples=250, deadline=None)
@given(conditions(2, IDS), conditions(1, IDS), st.integers(0, 2**32))
def test_random_rules_over_several_steps_fire_as_in_plain_python(
    first: tuple[object, ...], second: tuple[object, ...], seed: int
) -> None:
    source = random.Random(seed)
    rules = compiled(first, second)
    count = source.randrange(1, 7)
    steps: list[list[Step]] = [[] for _ in range(count)]
    outputs: list[list[int]] = [[] for _ in range(count)]
    state = blank(rules, count)
    for _ in range(source.randrange(2, 7)):
        # Not every request takes part in every batch, nor at the same place in it.
        batch = source.sample(range(count), source.randrange(1, count + 1))
        rows = [random_row(source) for _ in batch]
        now = [oracle_step(r, tuple(outputs[i]), tuple(steps[i])) for i, r in zip(batch, rows, strict=True)]
        tail = rules.tail + source.randrange(2)
        signals = Given(rows, [outputs[i] for i in batch], tail, [state[i] for i in batch])
        expected = [0 if holds(first, step) else 1 if holds(second, step) else -1 for step in now]
        assert rules(signals) == expected
        after = rules.memories.kept(signals)
        for index, request in enumerate(batch):
            alone = Given([rows[index]], [outputs[request]], rules.tail, [state[request]])
            assert rules(alone) == [expected[index]]
            if state[request]:
                assert same(rules.memories.kept(alone)[0], after[index])
            steps[request].append(now[index])
            if source.random() < 0.8:
                outputs[request].append(int(rows[index]["token"]))
        for request, kept in zip(batch, after, strict=bool(rules.memories.width)):
            state[request] = kept


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
