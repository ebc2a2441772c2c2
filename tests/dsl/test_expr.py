"""Expressions: what is accepted, what tree it gives, and what is said of everything else."""

from __future__ import annotations

import builtins

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenflow.dsl.expr import SIGNALS, parse_condition, parse_weight
from tokenflow.dsl.scan import MAX_DEPTH, MAX_LENGTH, ExpressionError
from tokenflow.dsl.tree import walk

ENTROPY, TAU = ("signal", "entropy"), ("param", "tau")
SIGNAL_NAMES = "entropy, entropy_nats, confidence, margin, logprob, token, position, run_length, draw"
NAMES = f"signals: {SIGNAL_NAMES}; params: tau"
FUNCTIONS = "functions: abs, max, min, head, threshold, at, follows, window, momentum"
WINDOW = '"window" needs two arguments, the second a whole number from 1 to 64, as in window(entropy, 3)'
MOMENTUM = '"momentum" needs two arguments, the second a number in [0, 1), as in momentum(entropy, 0.7)'
ESCAPES = r"known: \n \t \r \b \f \\ \" \' \uXXXX"
TEXT = "a text stands only inside head(...), threshold(...), at(...) or follows(...)"


def number(value: float) -> tuple[object, ...]:
    return ("number", value)


def faults(text: str) -> list[tuple[int, str]]:
    with pytest.raises(ExpressionError) as caught:
        parse_condition(text, ["tau"], ["r2r"])
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
        ("draw < 0.5", ("<", ("signal", "draw"), number(0.5))),
        ('head("r2r") >= threshold("r2r")', (">=", ("head", "r2r"), ("threshold", "r2r"))),
        ("head('r2r') > 0", (">", ("head", "r2r"), number(0))),
        (r'at("\n\n")', ("at", "\n\n")),
        ("at('\n\n') or follows( 'a\tb' )", ("or", ("at", "\n\n"), ("follows", "a\tb"))),
        (r'at("\"\'\\\u00e9\ud83d\ude42🙂")', ("at", "\"'\\é🙂🙂")),
        ("at('</call>') and  entropy > tau", ("and", ("at", "</call>"), (">", ENTROPY, TAU))),
        ("at('é') and entropy > tau and at('# x')", ("and", ("at", "é"), (">", ENTROPY, TAU), ("at", "# x"))),
        ("window(entropy, 3) > tau", (">", ("window", ENTROPY, 3), TAU)),
        (
            "window(entropy < tau, 64) > momentum(-tau, 0)",
            (">", ("window", ("bool", ("<", ENTROPY, TAU)), 64), ("momentum", ("neg", TAU), 0.0)),
        ),
        (
            "window(at('x'), 1) * 2 > momentum(true, 0.7)",
            (
                ">",
                ("*", ("window", ("bool", ("at", "x")), 1), number(2)),
                ("momentum", ("bool", ("boolean", True)), 0.7),
            ),
        ),
        (
            "true and false and true",
            ("and", ("boolean", True), ("boolean", False), ("boolean", True)),
        ),
    ],
)
def test_an_expression_becomes_a_tree_of_plain_data(text: str, tree: tuple[object, ...]) -> None:
    assert parse_condition(text, ["tau"], ["r2r"]) == tree


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
    "sqrt(entropy) > 0": [(1, f'unknown function "sqrt" ({FUNCTIONS})')],
    "max > 0": [(1, '"max" is a function: give it arguments, as in max(a, b)')],
    "max(1) > 0": [(1, '"max" needs at least two arguments, as in max(a, b)')],
    "min() > 0": [(1, '"min" needs at least two arguments, as in min(a, b)')],
    "abs(1, 2) > 0": [(1, '"abs" needs one argument, as in abs(a)')],
    "abs() > 0": [(1, '"abs" needs one argument, as in abs(a)')],
    "entropy() > 0": [(1, '"entropy" is a number, not a function: write it without "()"')],
    "tau(1) > 0": [(1, '"tau" is a number, not a function: write it without "()"')],
    "head > 0.5": [(1, '"head" is a function: give it arguments, as in head("name")')],
    "at": [(1, r'"at" is a function: give it arguments, as in at("\n\n")')],
    "draw() > 0": [(1, '"draw" is a number, not a function: write it without "()"')],
    "r2r > 0.5": [(1, '"r2r" is a router head: its score is head("r2r")')],
    "r2r(1) > 0.5": [(1, f'unknown function "r2r" ({FUNCTIONS})')],
    'head("r2") > 0.5': [(6, 'unknown head "r2" (did you mean "r2r"?)')],
    'threshold("zzz") > 0.5': [(11, 'unknown head "zzz" (heads: r2r)')],
}
ARGUMENTS = {
    "head() > 0.5": [(1, '"head" needs one text in quotes, as in head("name")')],
    "head(r2r) > 0.5": [(1, '"head" needs one text in quotes, as in head("name")')],
    'head("r2r", 2) > 0.5': [(1, '"head" needs one text in quotes, as in head("name")')],
    "threshold(0.5) > 0": [(1, '"threshold" needs one text in quotes, as in threshold("name")')],
    "at(3)": [(1, r'"at" needs one text in quotes, as in at("\n\n")')],
    'follows("a", "b")': [(1, r'"follows" needs one text in quotes, as in follows("\n\n")')],
    'at("")': [(4, 'the text of "at" must have 1 to 200 characters')],
    f'follows("{"x" * 201}")': [(9, 'the text of "follows" must have 1 to 200 characters')],
    "window(entropy) > 0": [(1, f"{WINDOW}")],
    "window(entropy, 0) > 0": [(1, WINDOW)],
    "window(entropy, 65) > 0": [(1, WINDOW)],
    "window(entropy, 3.0) > 0": [(1, WINDOW)],
    "window(entropy, tau) > 0": [(1, WINDOW)],
    "window(entropy, -3) > 0": [(1, WINDOW)],
    "window(entropy, 2, 2) > 0": [(1, WINDOW)],
    "momentum(entropy, 1) > 0": [(1, MOMENTUM)],
    "momentum(entropy, 1.5) > 0": [(1, MOMENTUM)],
    "momentum(entropy, -0.1) > 0": [(1, MOMENTUM)],
    "momentum(entropy, tau) > 0": [(1, MOMENTUM)],
    "window(momentum(entropy, 0.5), 3) > 0": [(8, '"momentum" cannot stand inside "window"')],
    "momentum(1 + window(entropy, 3), 0.5) > 0": [(14, '"window" cannot stand inside "momentum"')],
    "window(window(entropy, 3) > 0, 3) > 0": [(8, '"window" cannot stand inside "window"')],
    "window(zzz, 3) + window(entropi, 3) > 0": [
        (8, f'unknown name "zzz" ({NAMES})'),
        (25, 'unknown name "entropi" (did you mean "entropy"?)'),
    ],
    "window(entropy, 3)": [(1, 'expected a condition, got a number: compare it, as in "entropy > 0.5"')],
    'at("a") > 0': [(1, r'">" needs numbers, but "at(\"a\")" is a condition')],
    'head("r2r") and true': [(1, r'"and" needs conditions, but "head(\"r2r\")" is a number')],
}
TEXTS = {
    '"text" > 0': [(1, TEXT)],
    'entropy > "é" and zzz > 0': [(11, TEXT), (19, f'unknown name "zzz" ({NAMES})')],
    "max('a', 1) > 0": [(5, TEXT)],
    "entropy > 'open": [(11, '"\'" is never closed')],
    'at("a b > c': [(4, r'"\"" is never closed')],
    r'at("\")': [(4, r'"\"" is never closed')],
    'at("a" "b")': [(8, r'unexpected "\"b\""')],
    'at("a"b)': [(7, 'unexpected "b"')],
    'f"{tau}" > 0': [(2, r'unexpected "\"{tau}\""')],
    r'at("\d")': [(5, rf'unknown escape "\\d" ({ESCAPES})')],
    r'at("ok\n\q\x20")': [
        (9, rf'unknown escape "\\q" ({ESCAPES})'),
        (11, rf'unknown escape "\\x" ({ESCAPES})'),
    ],
    r'at("\u00")': [(5, rf'unknown escape "\\u" ({ESCAPES})')],
    'at("a\\\nb")': [(6, rf'unknown escape "\\\n" ({ESCAPES})')],
    r'at("a\ud800")': [(4, "a text with half a surrogate pair")],
    'at("\udfff")': [(4, "a text with half a surrogate pair")],
}
BREAKOUTS = {
    "entropy.__class__ > 0": [(8, 'attributes are not supported, got ".__class__"')],
    "entropy . real > 0": [(9, 'attributes are not supported, got ". real"')],
    "().__class__.__bases__": [
        (3, 'attributes are not supported, got ".__class__"'),
        (13, 'attributes are not supported, got ".__bases__"'),
    ],
    "1..real > 0": [(3, 'attributes are not supported, got ".real"')],
    "tau[0] > 0": [(4, '"[" is not supported'), (6, '"]" is not supported')],
    "{1: 2}": [(1, '"{" is not supported'), (3, '":" is not supported'), (6, '"}" is not supported')],
    "open('/etc/passwd') > 0": [(1, f'unknown function "open" ({FUNCTIONS})')],
    "__import__('os') > 0": [(1, f'unknown function "__import__" ({FUNCTIONS})')],
    "eval('1') > 0": [(1, f'unknown function "eval" ({FUNCTIONS})')],
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
}


WRONG = {**SYNTAX, **TYPES, **NAMING, **ARGUMENTS, **TEXTS, **BREAKOUTS}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_expression_is_refused_with_its_columns(text: str) -> None:
    assert faults(text) == WRONG[text]


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
    "*", "**", "/", "//", "%", "@", "|", "&", "~", "\\", "#", "'os'", '"', "'r2r'", '"\\n"', "at", "follows",
    "threshold", "window", "momentum", "3", "0", "1", "1.5", "1e9", "0x1",
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
        case (("head" | "threshold"), [name]):
            assert name == "r2r"
        case (("at" | "follows"), [str(text)]):
            assert text
            text.encode()
        case "window", [of, int(length)]:
            assert 1 <= length <= 64
            assert_plain_number(of)
        case "momentum", [of, float(share)]:
            assert 0 <= share < 1
            assert_plain_number(of)
        case _:
            assert tag in TAGS
            for argument in arguments:
                assert_plain(argument)


def assert_plain_number(tree: object) -> None:
    """What a window or a momentum is of: no other one, and a condition as a number."""
    assert isinstance(tree, tuple)
    assert not {"window", "momentum"} & {node for node, *_ in walk(tree)}
    assert_plain(tree[1] if tree[0] == "bool" else tree)


@settings(max_examples=700, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS), max_size=24).map(" ".join)))
@example("().__class__.__base__.__subclasses__() > 0")
@example("true " + "and true " * 200)
@example("window(at('r2r'), 3) > momentum(head('r2r'), 0.5) and follows('\\u0041')")
def test_garbage_gives_a_tree_of_known_nodes_or_the_one_error(text: str) -> None:
    try:
        tree = parse_condition(text, ["tau"], ["r2r"])
    except ExpressionError as error:
        assert error.faults
        assert all(0 <= offset <= len(text) and message for offset, message in error.faults)
    else:
        assert_plain(tree)


def test_parsing_opens_no_file_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("an expression reached a builtin")

    texts = [*WRONG, "entropy > tau"]
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


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("0.5", number(0.5)),
        ("1 - wa - wb", ("-", ("-", number(1), ("param", "wa")), ("param", "wb"))),
        ("max(wa, 0) / 2", ("/", ("max", ("param", "wa"), number(0)), number(2))),
    ],
)
def test_a_weight_is_arithmetic_over_params(text: str, tree: tuple[object, ...]) -> None:
    assert parse_weight(text, ["wa", "wb"]) == tree


CHANGES = "differs from token to token: use numbers and params only"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("wa > 0", [(1, "expected a number, got a condition")]),
        ("true", [(1, "expected a number, got a condition")]),
        ("entropy", [(1, f'"entropy" {CHANGES}')]),
        ("wa + draw", [(6, f'"draw" {CHANGES}')]),
        ('head("r2r")', [(1, f'"head" {CHANGES}')]),
        ("window(wa, 3)", [(1, f'"window" {CHANGES}')]),
        ("1 - shar", [(5, 'unknown name "shar" (did you mean "share"?)')]),
        ("zzz", [(1, 'unknown name "zzz" (params: wa, share)')]),
        ("wa +", [(5, "the expression ends where a value is missing")]),
    ],
)
def test_a_wrong_weight_is_refused_with_its_columns(text: str, wanted: list[tuple[int, str]]) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_weight(text, ["wa", "share"])
    assert [(offset + 1, message) for offset, message in caught.value.faults] == wanted
