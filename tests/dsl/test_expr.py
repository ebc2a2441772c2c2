"""Expressions: what is accepted, what tree it gives, and what is said of everything else."""

from __future__ import annotations

import builtins

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenflow.dsl.expr import SIGNALS, parse_condition, parse_weight
from tokenflow.dsl.scan import MAX_DEPTH, MAX_LENGTH, ExpressionError

ENTROPY, TAU = ("signal", "entropy"), ("param", "tau")
NAMES = (
    "signals: entropy, entropy_nats, confidence, margin, logprob, token, position, run_length; params: tau"
)


def number(value: float) -> tuple[object, ...]:
    return ("number", value)


def faults(text: str) -> list[tuple[int, str]]:
    with pytest.raises(ExpressionError) as caught:
        parse_condition(text, ["tau"])
    return [(offset + 1, message) for offset, message in caught.value.faults]


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("entropy > tau", (">", ENTROPY, TAU)),
        ("  entropy>tau  ", (">", ENTROPY, TAU)),
        ("entropy\n  > tau", (">", ENTROPY, TAU)),
        ("((entropy)) <= (tau)", ("<=", ENTROPY, TAU)),
        ("true", ("boolean", True)),
        ("not false", ("not", ("boolean", False))),
        ("token == 151668", ("==", ("signal", "token"), number(151668))),
        ("entropy != 1e-3", ("!=", ENTROPY, number(0.001))),
        ("entropy < .5", ("<", ENTROPY, number(0.5))),
        ("entropy >= 5.", (">=", ENTROPY, number(5.0))),
        ("-entropy > -3", (">", ("neg", ENTROPY), ("neg", number(3)))),
        (
            "1 + entropy * 2 - tau / 3 > 0",
            (
                ">",
                ("-", ("+", number(1), ("*", ENTROPY, number(2))), ("/", TAU, number(3))),
                number(0),
            ),
        ),
        ("position % 5 == 0", ("==", ("%", ("signal", "position"), number(5)), number(0))),
        ("0.1 < entropy <= tau", ("and", ("<", number(0.1), ENTROPY), ("<=", ENTROPY, TAU))),
        ("max(entropy, tau, 1) > 0", (">", ("max", ENTROPY, TAU, number(1)), number(0))),
        ("min(entropy, tau) > abs(tau)", (">", ("min", ENTROPY, TAU), ("abs", TAU))),
        (
            "entropy > tau and not true or false",
            (
                "or",
                ("and", (">", ENTROPY, TAU), ("not", ("boolean", True))),
                ("boolean", False),
            ),
        ),
        (
            "true and false and true",
            ("and", ("boolean", True), ("boolean", False), ("boolean", True)),
        ),
    ],
)
def test_an_expression_becomes_a_tree_of_plain_data(text: str, tree: tuple[object, ...]) -> None:
    assert parse_condition(text, ["tau"]) == tree


def test_whole_and_real_numbers_keep_their_types() -> None:
    (_, one, other) = parse_condition("1 < 1.0")
    assert [type(node[1]) for node in (one, other)] == [int, float]  # type: ignore[index]


def test_every_signal_is_a_number() -> None:
    for name in SIGNALS:
        assert parse_condition(f"{name} > 0") == (">", ("signal", name), number(0))


SYNTAX = {
    "": [(1, "the expression is empty")],
    "  ": [(1, "the expression is empty")],
    "entropy >": [(10, "the expression ends where a value is missing")],
    "entropy > tau and": [(18, "the expression ends where a value is missing")],
    "not": [(4, "the expression ends where a value is missing")],
    "> 3": [(1, 'unexpected ">"')],
    "entropy > > 3": [(11, 'unexpected ">"')],
    "entropy tau": [(9, 'unexpected "tau"')],
    "(entropy tau)": [(10, 'unexpected "tau"')],
    "1 2": [(3, 'unexpected "2"')],
    "1.2.3 > 0": [(4, 'unexpected ".3"')],
    "1 + not true": [(5, 'unexpected "not"')],
    "+1 > 0": [(1, 'unexpected "+"')],
    "(entropy > tau": [(1, '"(" is never closed')],
    "max(1, (2 > 0": [(8, '"(" is never closed')],
    "entropy > tau)": [(14, '")" without "("')],
    "()": [(2, 'unexpected ")"')],
    "entropy, tau": [(8, 'unexpected ","')],
    "(entropy, tau)": [(9, 'unexpected ","')],
    "max(1, 2,) > 0": [(10, 'unexpected ")"')],
    "max(, 2) > 0": [(5, 'unexpected ","')],
    "(1)(2) > 0": [(4, 'unexpected "("')],
    "3(4) > 0": [(2, 'unexpected "("')],
    "max(1, 2)(3) > 0": [(10, 'unexpected "("')],
    "entropy = tau": [(9, '"=" is not supported (did you mean "=="?)')],
    "entropy === tau": [(9, '"===" is not supported (did you mean "=="?)')],
    "entropy <> tau": [(9, '"<>" is not supported (did you mean "!="?)')],
    "entropy => tau": [(9, '"=>" is not supported (did you mean ">="?)')],
    "entropy =< tau": [(9, '"=<" is not supported (did you mean "<="?)')],
    "entropy ≤ tau": [(9, '"≤" is not supported (did you mean "<="?)')],
    "true && false": [(6, '"&&" is not supported (did you mean "and"?)')],
    "true & false": [(6, '"&" is not supported (did you mean "and"?)')],
    "true || false": [(6, '"||" is not supported (did you mean "or"?)')],
    "true | false": [(6, '"|" is not supported (did you mean "or"?)')],
    "!true": [(1, '"!" is not supported (did you mean "not"?)')],
    "~true": [(1, '"~" is not supported (did you mean "not"?)')],
    "entropy is tau": [(9, '"is" is not supported (did you mean "=="?)')],
    "token // 2 == 3": [(7, '"//" is not supported (did you mean "/"?)')],
    "9 ** 9 ** 9 > 0": [(3, '"**" is not supported'), (8, '"**" is not supported')],
    "token << 2 > 0": [(7, '"<<" is not supported')],
    "token ^ 2 > 0": [(7, '"^" is not supported')],
    "token @ 2 > 0": [(7, '"@" is not supported')],
    "True": [(1, '"True" is not supported (did you mean "true"?)')],
    "None": [(1, '"None" is not supported')],
    "entropy > tau  # uncertain": [(16, '"#" is not supported')],
    "entropy > tau; true": [(14, '";" is not supported')],
    "entropy > \\tau": [(11, '"\\\\" is not supported')],
    "entropy > \0": [(11, '"\\u0000" is not supported')],
    "ｅntropy > 0": [(1, '"ｅntropy" is not supported')],
    "0777 > 1": [(1, 'malformed number "0777"')],
    "1_000 > 1": [(1, 'malformed number "1_000"')],
    "0x10 > 1": [(1, 'malformed number "0x10"')],
    "2j > 1": [(1, 'malformed number "2j"')],
    "1e999 > 1": [(1, 'number out of range: "1e999"')],
    "entropy > 1e39": [(11, 'number out of range: "1e39"')],
    "9" * 400 + " > 1": [(1, f'number out of range: "{"9" * 37}..."')],
}
TYPES = {
    "entropy": [(1, 'expected a condition, got a number: compare it, as in "entropy > 0.5"')],
    " 3 + 4": [(2, 'expected a condition, got a number: compare it, as in "entropy > 0.5"')],
    "entropy and true": [(1, '"and" needs conditions, but "entropy" is a number')],
    "true or tau": [(9, '"or" needs conditions, but "tau" is a number')],
    "not entropy": [(5, '"not" needs conditions, but "entropy" is a number')],
    "(entropy > tau) + 1 > 0": [(2, '"+" needs numbers, but "entropy > tau" is a condition')],
    "1 % true > 0": [(5, '"%" needs numbers, but "true" is a condition')],
    "-true > 0": [(2, '"-" needs numbers, but "true" is a condition')],
    "max(true, 1) > 0": [(5, '"max" needs numbers, but "true" is a condition')],
    "(entropy > tau) == true": [
        (2, '"==" needs numbers, but "entropy > tau" is a condition'),
        (20, '"==" needs numbers, but "true" is a condition'),
    ],
}
NAMING = {
    "entropi > tau": [(1, 'unknown name "entropi" (did you mean "entropy"?)')],
    "Entropy > tau": [(1, 'unknown name "Entropy" (did you mean "entropy"?)')],
    "entropy > tua": [(11, 'unknown name "tua" (did you mean "tau"?)')],
    "zzz > 0": [(1, f'unknown name "zzz" ({NAMES})')],
    "entropi > 0 and zzz > 0": [
        (1, 'unknown name "entropi" (did you mean "entropy"?)'),
        (17, f'unknown name "zzz" ({NAMES})'),
    ],
    "maxi(1, 2) > 0": [(1, 'unknown function "maxi" (did you mean "max"?)')],
    "sqrt(entropy) > 0": [(1, 'unknown function "sqrt" (functions: abs, max, min)')],
    "max > 0": [(1, '"max" is a function: give it arguments, as in max(a, b)')],
    "max(1) > 0": [(1, '"max" needs at least two arguments, as in max(a, b)')],
    "min() > 0": [(1, '"min" needs at least two arguments, as in min(a, b)')],
    "abs(1, 2) > 0": [(1, '"abs" needs one argument, as in abs(a)')],
    "abs() > 0": [(1, '"abs" needs one argument, as in abs(a)')],
    "entropy() > 0": [(1, '"entropy" is a number, not a function: write it without "()"')],
    "tau(1) > 0": [(1, '"tau" is a number, not a function: write it without "()"')],
    'head("r2r") > 0.5': [(1, '"head" is not available yet')],
    "head > 0.5": [(1, '"head" is not available yet')],
    "draw == 2": [(1, '"draw" is not available yet')],
}
ESCAPES = {
    "entropy.__class__ > 0": [(8, 'attributes are not supported, got ".__class__"')],
    "entropy . real > 0": [(9, 'attributes are not supported, got ". real"')],
    "().__class__.__bases__": [
        (3, 'attributes are not supported, got ".__class__"'),
        (13, 'attributes are not supported, got ".__bases__"'),
    ],
    "1..real > 0": [(3, 'attributes are not supported, got ".real"')],
    "tau[0] > 0": [(4, '"[" is not supported'), (6, '"]" is not supported')],
    "{1: 2}": [(1, '"{" is not supported'), (3, '":" is not supported'), (6, '"}" is not supported')],
    "open('/etc/passwd') > 0": [(1, 'unknown function "open" (functions: abs, max, min)')],
    "__import__('os') > 0": [(1, 'unknown function "__import__" (functions: abs, max, min)')],
    "eval('1') > 0": [(1, 'unknown function "eval" (functions: abs, max, min)')],
    "__builtins__ > 0": [(1, f'unknown name "__builtins__" ({NAMES})')],
    "lambda: 0": [(1, '"lambda" is not supported'), (7, '":" is not supported')],
    "entropy if true else tau": [(9, '"if" is not supported'), (17, '"else" is not supported')],
    "[x for x in y]": [
        (1, '"[" is not supported'),
        (4, '"for" is not supported'),
        (10, '"in" is not supported'),
        (14, '"]" is not supported'),
    ],
    "(x := 3) > 0": [(4, '":=" is not supported')],
    "import os": [(1, '"import" is not supported')],
    "await entropy": [(1, '"await" is not supported')],
    "max(*tau) > 0": [(5, 'unexpected "*"')],
    "max(**tau) > 0": [(5, '"**" is not supported')],
    "max(1, key=2) > 0": [(11, '"=" is not supported (did you mean "=="?)')],
    'f"{tau}" > 0': [(2, 'unexpected "\\"{tau}\\""')],
    '"text" > 0': [(1, 'text is not supported, got "text"')],
    "entropy > 'open": [(11, '"\'" is not supported')],
}


@pytest.mark.parametrize("text", [*SYNTAX, *TYPES, *NAMING, *ESCAPES])
def test_a_wrong_expression_is_refused_with_its_columns(text: str) -> None:
    assert faults(text) == {**SYNTAX, **TYPES, **NAMING, **ESCAPES}[text]


def test_the_error_lists_its_faults_in_order() -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_condition("foo > 0 and entropy")
    assert str(caught.value).startswith('column 1: unknown name "foo"')
    assert '; column 13: "and" needs conditions' in str(caught.value)


def test_an_expression_longer_than_the_limit_is_refused() -> None:
    text = "true" + " or true" * (MAX_LENGTH // 8)
    assert faults(text) == [(MAX_LENGTH + 1, f"longer than {MAX_LENGTH} characters")]


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("(" * (MAX_DEPTH + 1) + "true" + ")" * (MAX_DEPTH + 1), MAX_DEPTH + 1),
        ("not " * (MAX_DEPTH + 1) + "true", 4 * MAX_DEPTH + 1),
        ("0 < " + "-" * 100 + "1", MAX_DEPTH + 4),
        ("0 < " + "+".join(["1"] * MAX_DEPTH), 5),
    ],
)
def test_an_expression_nested_deeper_than_the_limit_is_refused(text: str, column: int) -> None:
    assert faults(text) == [(column, f"nested deeper than {MAX_DEPTH} levels")]


@pytest.mark.parametrize(
    "text", ["0 < " + "-" * 1900 + "1", "0 < " + "+".join(["1"] * 900), "(" * 1000 + ")" * 1000]
)
def test_an_expression_nested_deeper_than_python_can_parse_is_refused(text: str) -> None:
    ((_, message),) = faults(text)
    assert message == f"nested deeper than {MAX_DEPTH} levels"


def test_an_expression_nested_to_the_limit_is_accepted() -> None:
    parse_condition("(" * MAX_DEPTH + "true" + ")" * MAX_DEPTH)
    parse_condition("not " * (MAX_DEPTH - 1) + "true")


WORDS = [
    *SIGNALS, "tau", "true", "false", "and", "or", "not", "max", "min", "abs", "head", "draw",
    "__import__", "open", "eval", "exec", "lambda", "if", "else", "for", "in", "is", "await", "x",
    "(", ")", "[", "]", "{", "}", ",", ".", ":", ":=", "=", "==", "<", "<=", ">", "!=", "!", "+", "-",
    "*", "**", "/", "//", "%", "@", "|", "&", "~", "\\", "#", "'os'", '"', "0", "1", "1.5", "1e9", "0x1",
    "__class__", "\n", "\0", "…", "\ud800",
]  # fmt: skip
TAGS = {"neg", "abs", "min", "max", "not", "and", "or", *"+-*/%<>", "<=", ">=", "==", "!="}


def assert_plain(tree: object) -> None:
    assert isinstance(tree, tuple)
    tag, *arguments = tree
    match tag, arguments:
        case ("number", [int() | float()]) | ("boolean", [bool()]):
            return
        case "signal", [name]:
            assert name in SIGNALS
        case "param", [name]:
            assert name == "tau"
        case _:
            assert tag in TAGS
            for argument in arguments:
                assert_plain(argument)


@settings(max_examples=700, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS), max_size=24).map(" ".join)))
@example("().__class__.__base__.__subclasses__() > 0")
@example("true " + "and true " * 200)
def test_garbage_gives_a_tree_of_known_nodes_or_the_one_error(text: str) -> None:
    try:
        tree = parse_condition(text, ["tau"])
    except ExpressionError as error:
        assert error.faults
        assert all(0 <= offset <= len(text) and message for offset, message in error.faults)
    else:
        assert_plain(tree)


def test_parsing_opens_no_file_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("an expression reached a builtin")

    texts = [*SYNTAX, *TYPES, *NAMING, *ESCAPES, "entropy > tau"]
    parse_condition("entropy > tau and not max(1, 2) < abs(-3) % 2", ["tau"])
    with monkeypatch.context() as patch:
        for name in ("open", "eval", "exec", "input", "__import__"):
            patch.setattr(builtins, name, forbidden)
        results = [parses(text) for text in texts]
    assert results == [False] * (len(texts) - 1) + [True]


def parses(text: str) -> bool:
    try:
        parse_condition(text, ["tau"])
    except ExpressionError:
        return False
    return True
