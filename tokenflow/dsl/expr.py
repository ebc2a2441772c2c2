"""Expressions of recipes: text to a tree of plain data, parsed with :mod:`ast` and never evaluated here.

A tree is a tuple ``(node, *arguments)``; on the wire its tuples become lists.  The nodes:

========================================  ==================================================  =========
node                                      arguments                                           gives
========================================  ==================================================  =========
``number``                                an int (whole) or a float                           number
``boolean``                               True or False                                       condition
``signal``                                a name of :data:`SIGNALS`                           number
``param``                                 a parameter of the recipe                           number
``neg`` ``abs``                           one number                                          number
``+`` ``-`` ``*`` ``/`` ``%``             two numbers                                         number
``min`` ``max``                           two or more numbers                                 number
``<`` ``<=`` ``>`` ``>=`` ``==`` ``!=``   two numbers                                         condition
``and`` ``or``                            two or more conditions                              condition
``not``                                   one condition                                       condition
========================================  ==================================================  =========

A chained comparison ``a < b < c`` is ``("and", ("<", a, b), ("<", b, c))``.  How the nodes compute is said
in :mod:`tokenflow.routing.rules`.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

from tokenflow.dsl.ir import Expr
from tokenflow.dsl.wording import did_you_mean, show

SIGNALS: Mapping[str, str] = {
    "entropy": "entropy of the next-token distribution over ln V, in [0, 1]",
    "entropy_nats": "entropy of the next-token distribution, in nats",
    "confidence": "the largest probability",
    "margin": "the largest probability minus the second largest",
    "logprob": "log-probability of the sampled token, in nats",
    "token": "id of the sampled token",
    "position": "index of the sampled token in the output, from 0",
    "run_length": "tokens committed by this model since the request came to it, the sampled one included",
}
FUNCTIONS = ("abs", "max", "min")
PLANNED = ("draw", "head")
RESERVED = frozenset({*SIGNALS, *FUNCTIONS, *PLANNED, "true", "false", *keyword.kwlist})
"""Names that no parameter may have."""

UNCLOSED = '"(" is never closed'
"""A fault that a comma inside a YAML flow mapping causes, too."""

MAX_LENGTH = 2000
MAX_DEPTH = 64
MAX_WHOLE = 2**63 - 1
MAX_REAL = 3.4028234663852886e38
"""The largest finite float32: signals and parameters are float32."""

Kind = Literal["number", "condition"]


class Fault(NamedTuple):
    """Something wrong with an expression, at a character offset (from 0) of its text."""

    offset: int
    message: str


class ExpressionError(Exception):
    """An expression is wrong; ``faults`` lists what was found.  Recipe errors are made of it."""

    def __init__(self, faults: Collection[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(f"column {offset + 1}: {message}" for offset, message in self.faults))


def parse_condition(text: str, params: Collection[str] = ()) -> Expr:
    """Parse an expression that must be a condition.

    :param params: names that the expression may use beside the signals.
    :raises ExpressionError: if the text is not a well-typed condition.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError([Fault(MAX_LENGTH, f"longer than {MAX_LENGTH} characters")])
    line = re.sub(r"\s", " ", text)
    if faults := _scan(line):
        raise ExpressionError(faults)
    source = line.strip()
    start = line.index(source)
    try:
        body = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError([_unexpected(line, start + (error.offset or 1) - 1)]) from None
    except (RecursionError, MemoryError):
        raise ExpressionError([_too_deep(start)]) from None
    reader = _Reader(source, start, params)
    tree, kind = reader.read(body, 1)
    if kind == "number":
        reader.faults.append(
            Fault(start, 'expected a condition, got a number: compare it, as in "entropy > 0.5"')
        )
    if reader.faults:
        raise ExpressionError(sorted(reader.faults))
    return tree


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\w*)
    | (?P<word>[^\W\d]\w*)
    | (?P<text>"[^"]*"|'[^']*')
    | (?P<attribute>\.\s*[^\W\d]\w*)
    | (?P<symbol>\*\*|//|<<|>>|&&|\|\||===|==|!=|<=|>=|=>|=<|<>|:=|\S)
    )""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_INFIX = frozenset({"+", "*", "/", "%", "<", "<=", ">", ">=", "==", "!=", "and", "or"})
_FOREIGN = frozenset({*keyword.kwlist, "is"} - {"and", "or", "not"})
_INSTEAD = {
    "&&": "and",
    "&": "and",
    "||": "or",
    "|": "or",
    "!": "not",
    "~": "not",
    "=": "==",
    "===": "==",
    "is": "==",
    "<>": "!=",
    "=>": ">=",
    "=<": "<=",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "−": "-",
    "×": "*",
    "//": "/",
    "True": "true",
    "False": "false",
}


def _scan(line: str) -> list[Fault]:
    """What no expression may contain; or else the first token that stands where it cannot.

    Done here, and not left to the syntax errors of :mod:`ast`, so that messages and columns are our own.
    """
    end = len(line.rstrip())
    if not end:
        return [Fault(0, "the expression is empty")]
    foreign: list[Fault] = []
    misplaced: list[Fault] = []
    opened: list[tuple[int, bool]] = []
    previous, operand_next = "", True
    for match in _TOKEN.finditer(line, 0, end):
        form = match.lastgroup or ""
        token, at = match[form], match.start(form)
        if fault := _foreign(form, token):
            foreign.append(Fault(at, fault))
            continue
        if token == ")" and not opened:
            misplaced.append(Fault(at, '")" without "("'))
        elif token == "," and not (opened and opened[-1][1]):
            misplaced.append(Fault(at, 'unexpected ","'))
        elif token == "(" and len(opened) == MAX_DEPTH:
            misplaced.append(_too_deep(at))
        elif not _fits(token, previous, operand_next):
            misplaced.append(Fault(at, f"unexpected {show(token)}"))
        call = token == "(" and previous == "name"
        if token == "(":
            opened.append((at, call))
        elif token == ")" and opened:
            opened.pop()
        operand_next = token in _INFIX or token in ("-", "not", ",", "(")
        previous = "call" if call else "name" if form == "word" and not operand_next else ""
    if opened:
        misplaced.append(Fault(opened[-1][0], UNCLOSED))
    elif operand_next:
        misplaced.append(Fault(end, "the expression ends where a value is missing"))
    return foreign or misplaced[:1]


def _fits(token: str, previous: str, operand_next: bool) -> bool:
    if token == "-" or (token == "(" and previous == "name") or (token == ")" and previous == "call"):
        return True
    return operand_next != (token in _INFIX or token in (",", ")"))


def _foreign(form: str, token: str) -> str | None:
    if form == "number":
        if not _NUMBER.fullmatch(token):
            return f"malformed number {show(token)}"
        return None if float(token) <= MAX_REAL else f"number out of range: {show(token)}"
    if form == "attribute":
        return f"attributes are not supported, got {show(token)}"
    if (form == "word" and (token in _FOREIGN or not token.isascii())) or (
        form == "symbol" and token not in _INFIX and token not in ("-", ",", "(", ")")
    ):
        hint = f' (did you mean "{_INSTEAD[token]}"?)' if token in _INSTEAD else ""
        return f"{show(token)} is not supported{hint}"
    return None


def _unexpected(line: str, at: int) -> Fault:
    match = _TOKEN.match(line, at)
    return Fault(at, f"unexpected {show(match[0].strip() if match else line)}")


def _too_deep(at: int) -> Fault:
    return Fault(at, f"nested deeper than {MAX_DEPTH} levels")


_ARITHMETIC: Mapping[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Mod: "%",
}
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_NOTHING: Expr = ("boolean", False)


class _Reader:
    """Walks a syntax tree of whitelisted nodes, collecting faults; a kind is None below a fault."""

    def __init__(self, source: str, start: int, params: Collection[str]) -> None:
        self.source = source
        self.start = start
        self.params = params
        self.faults: list[Fault] = []

    def read(self, node: ast.expr, depth: int) -> tuple[Expr, Kind | None]:
        if depth > MAX_DEPTH:
            raise ExpressionError([_too_deep(self.start + node.col_offset)])
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                whole = isinstance(value, int) and value <= MAX_WHOLE
                return ("number", value if whole else float(value)), "number"
            case ast.Constant(value=str(text)):
                return self._refuse(node, f"text is not supported, got {show(text)}")
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.UnaryOp(op=ast.Not()):
                return ("not", self._operand(node.operand, "not", "condition", depth)), "condition"
            case ast.UnaryOp(op=ast.USub()):
                return ("neg", self._operand(node.operand, "-", "number", depth)), "number"
            case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
                symbol = _ARITHMETIC[type(op)]
                left = self._operand(node.left, symbol, "number", depth)
                return (symbol, left, self._operand(node.right, symbol, "number", depth)), "number"
            case ast.BoolOp():
                symbol = "and" if isinstance(node.op, ast.And) else "or"
                parts = (self._operand(part, symbol, "condition", depth) for part in node.values)
                return (symbol, *parts), "condition"
            case ast.Compare(ops=ops) if all(type(op) in _COMPARISONS for op in ops):
                symbols = [_COMPARISONS[type(op)] for op in ops]
                sides = [
                    self._operand(side, symbol, "number", depth)
                    for side, symbol in zip(
                        (node.left, *node.comparators), (symbols[0], *symbols), strict=True
                    )
                ]
                links = [(symbol, *pair) for symbol, pair in zip(symbols, pairwise(sides), strict=True)]
                return (links[0] if len(links) == 1 else ("and", *links)), "condition"
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(node, name, arguments, depth)
        return self._refuse(node, f"{self._segment(node)} is not supported")

    def _operand(self, node: ast.expr, symbol: str, wanted: Kind, depth: int) -> Expr:
        tree, kind = self.read(node, depth + 1)
        if kind is not None and kind != wanted:
            message = f'"{symbol}" needs {wanted}s, but {self._segment(node)} is a {kind}'
            self._refuse(node, message)
        return tree

    def _name(self, node: ast.Name, name: str) -> tuple[Expr, Kind | None]:
        if name in ("true", "false"):
            return ("boolean", name == "true"), "condition"
        if name in SIGNALS:
            return ("signal", name), "number"
        if name in FUNCTIONS:
            return self._refuse(node, f'"{name}" is a function: give it arguments, as in {_EXAMPLES[name]}')
        if name in PLANNED:
            return self._refuse(node, f'"{name}" is not available yet')
        if name in self.params:
            return ("param", name), "number"
        hint = did_you_mean(name, (*SIGNALS, *self.params, "true", "false"))
        known = f"signals: {', '.join(SIGNALS)}; params: {', '.join(self.params) or 'none'}"
        return self._refuse(node, f"unknown name {show(name)}{hint or f' ({known})'}")

    def _call(
        self, node: ast.expr, name: str, arguments: list[ast.expr], depth: int
    ) -> tuple[Expr, Kind | None]:
        if name in PLANNED:
            return self._refuse(node, f'"{name}" is not available yet')
        if name in SIGNALS or name in self.params:
            return self._refuse(node, f'"{name}" is a number, not a function: write it without "()"')
        if name not in FUNCTIONS:
            hint = did_you_mean(name, FUNCTIONS) or f" (functions: {', '.join(FUNCTIONS)})"
            return self._refuse(node, f"unknown function {show(name)}{hint}")
        if (name == "abs") != (len(arguments) == 1) or not arguments:
            wanted = "one argument" if name == "abs" else "at least two arguments"
            return self._refuse(node, f'"{name}" needs {wanted}, as in {_EXAMPLES[name]}')
        return (name, *(self._operand(argument, name, "number", depth) for argument in arguments)), "number"

    def _refuse(self, node: ast.expr, message: str) -> tuple[Expr, None]:
        self.faults.append(Fault(self.start + node.col_offset, message))
        return _NOTHING, None

    def _segment(self, node: ast.expr) -> str:
        return show(self.source[node.col_offset : node.end_col_offset])


_EXAMPLES = {"abs": "abs(a)", "max": "max(a, b)", "min": "min(a, b)"}
