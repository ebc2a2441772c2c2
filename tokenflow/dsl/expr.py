"""Expressions of recipes: text to a tree of plain data, parsed with :mod:`ast` and never evaluated here.

A tree is a tuple ``(node, *arguments)``; on the wire its tuples become lists.  The nodes:

========================================  ==================================================  =========
node                                      arguments                                           gives
========================================  ==================================================  =========
``number``                                an int (whole) or a float                           number
``boolean``                               True or False                                       condition
``signal``                                a name of :data:`SIGNALS`                           number
``param``                                 a parameter of the recipe                           number
``head``                                  a router head of the recipe: its score              number
``threshold``                             a router head of the recipe: its threshold          number
``at``                                    a text: the output has just reached it              condition
``follows``                               a text: the output before the sampled token ends    condition
                                          in it, or is empty
``neg`` ``abs``                           one number                                          number
``+`` ``-`` ``*`` ``/`` ``%``             two numbers                                         number
``min`` ``max``                           two or more numbers                                 number
``window``                                a number and a count n: its mean over the last n    number
                                          steps of the request at this model, this one
                                          included (fewer at first)
``momentum``                              a number x and a share m: s, where every step       number
                                          of the request at this model makes s of
                                          m s + (1 - m) x, from s = 0
``bool``                                  one condition, inside the two above: 0 or 1         number
``<`` ``<=`` ``>`` ``>=`` ``==`` ``!=``   two numbers                                         condition
``and`` ``or``                            two or more conditions                              condition
``not``                                   one condition                                       condition
========================================  ==================================================  =========

A chained comparison ``a < b < c`` is ``("and", ("<", a, b), ("<", b, c))``.  Before a tree goes to a
worker, the texts of ``at`` and ``follows`` become tuples of token id sequences, each of which will do
(:func:`tokenflow.members.resolve_texts`).  How the nodes compute is said in :mod:`tokenflow.routing.rules`.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tokenflow.dsl.ir import Expr
from tokenflow.dsl.scan import MAX_DEPTH, MAX_WHOLE, ExpressionError, Fault, scan, too_deep, unexpected
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
    "draw": "a random number in [0, 1) for the position after the sampled token, the same at every model",
}
FUNCTIONS: Mapping[str, str] = {
    "abs": "abs(a)",
    "max": "max(a, b)",
    "min": "min(a, b)",
    "head": 'head("name")',
    "threshold": 'threshold("name")',
    "at": r'at("\n\n")',
    "follows": r'follows("\n\n")',
    "window": "window(entropy, 3)",
    "momentum": "momentum(entropy, 0.7)",
}
"""Every function with an example of its use."""

RESERVED = frozenset({*SIGNALS, *FUNCTIONS, "true", "false", *keyword.kwlist})
"""Names that no parameter may have."""

MAX_TEXT = 200
"""Most characters of the text of ``at`` and ``follows``."""
MAX_WINDOW = 64

Kind = Literal["number", "condition"]


@dataclass(frozen=True, slots=True)
class _Scope:
    """What an expression may name: params, heads and, if it may differ from token to token, signals."""

    params: Collection[str]
    heads: Collection[str] = ()
    per_token: bool = True


def parse_condition(text: str, params: Collection[str] = (), heads: Collection[str] = ()) -> Expr:
    """Parse an expression that must be a condition.

    :param params: names that the expression may use beside the signals.
    :param heads: names of router heads that it may ask.
    :raises ExpressionError: if the text is not a well-typed condition.
    """
    return _parse(text, _Scope(params, heads), "condition")


def parse_expression(text: str, params: Collection[str] = (), heads: Collection[str] = ()) -> Expr:
    """Parse an expression that may be a number or a condition; otherwise as :func:`parse_condition`.

    :raises ExpressionError: if the text is not a well-typed expression.
    """
    return _parse(text, _Scope(params, heads), None)


def parse_weight(text: str, params: Collection[str]) -> Expr:
    """Parse an expression that must be a number and that nothing but ``params`` decides.

    :raises ExpressionError: if the text is not arithmetic over numbers and ``params``.
    """
    return _parse(text, _Scope(params, per_token=False), "number")


def _parse(text: str, scope: _Scope, wanted: Kind | None) -> Expr:
    line, blank, texts = scan(text)
    source = blank.strip()
    start = blank.index(source)
    try:
        body = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError([unexpected(line, start + (error.offset or 1) - 1)]) from None
    except (RecursionError, MemoryError):
        raise ExpressionError([too_deep(start)]) from None
    reader = _Reader(line, start, texts, scope)
    tree, kind = reader.read(body, 1)
    if None not in (kind, wanted) and kind != wanted:
        hint = ': compare it, as in "entropy > 0.5"' if kind == "number" else ""
        reader.faults.append(Fault(start, f"expected a {wanted}, got a {kind}{hint}"))
    if reader.faults:
        raise ExpressionError(sorted(reader.faults))
    return tree


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
    """Walks a syntax tree of whitelisted nodes, collecting faults; a kind is None below a fault.

    ``over_steps`` is the function around the current node that remembers earlier steps.
    """

    def __init__(self, line: str, start: int, texts: Mapping[int, str], scope: _Scope) -> None:
        self.line = line
        self.start = start
        self.texts = texts
        self.scope = scope
        self.over_steps = ""
        self.faults: list[Fault] = []

    def read(self, node: ast.expr, depth: int) -> tuple[Expr, Kind | None]:
        if depth > MAX_DEPTH:
            raise ExpressionError([too_deep(self.start + node.col_offset)])
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                whole = isinstance(value, int) and value <= MAX_WHOLE
                return ("number", value if whole else float(value)), "number"
            case ast.Constant(value=str()):
                return self._refuse(node, f"a text stands only inside {_TEXT_FUNCTIONS}")
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
                return self._comparison(node, depth), "condition"
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(node, name, arguments, depth)
        return self._refuse(node, f"{self._segment(node)} is not supported")

    def _operand(self, node: ast.expr, symbol: str, wanted: Kind, depth: int) -> Expr:
        tree, kind = self.read(node, depth + 1)
        if kind is not None and kind != wanted:
            message = f'"{symbol}" needs {wanted}s, but {self._segment(node)} is a {kind}'
            self._refuse(node, message)
        return tree

    def _comparison(self, node: ast.Compare, depth: int) -> Expr:
        symbols = [_COMPARISONS[type(op)] for op in node.ops]
        sides = [
            self._operand(side, symbol, "number", depth)
            for side, symbol in zip((node.left, *node.comparators), (symbols[0], *symbols), strict=True)
        ]
        links = [(symbol, *pair) for symbol, pair in zip(symbols, pairwise(sides), strict=True)]
        return links[0] if len(links) == 1 else ("and", *links)

    def _name(self, node: ast.Name, name: str) -> tuple[Expr, Kind | None]:
        if name in ("true", "false"):
            return ("boolean", name == "true"), "condition"
        if name in SIGNALS:
            if not self.scope.per_token:
                return self._changes(node, name)
            return ("signal", name), "number"
        if name in FUNCTIONS:
            return self._refuse(node, f'"{name}" is a function: give it arguments, as in {FUNCTIONS[name]}')
        if name in self.scope.params:
            return ("param", name), "number"
        if name in self.scope.heads:
            return self._refuse(node, f'"{name}" is a router head: its score is head("{name}")')
        signals = SIGNALS if self.scope.per_token else {}
        hint = did_you_mean(name, (*signals, *self.scope.params, "true", "false"))
        known = f"params: {', '.join(self.scope.params) or 'none'}"
        if signals:
            known = f"signals: {', '.join(signals)}; {known}"
        return self._refuse(node, f"unknown name {show(name)}{hint or f' ({known})'}")

    def _call(
        self, node: ast.expr, name: str, arguments: list[ast.expr], depth: int
    ) -> tuple[Expr, Kind | None]:
        if name in SIGNALS or name in self.scope.params:
            return self._refuse(node, f'"{name}" is a number, not a function: write it without "()"')
        if name not in FUNCTIONS:
            hint = did_you_mean(name, FUNCTIONS) or f" (functions: {', '.join(FUNCTIONS)})"
            return self._refuse(node, f"unknown function {show(name)}{hint}")
        if name in ("abs", "max", "min"):
            if (name == "abs") != (len(arguments) == 1) or not arguments:
                return self._misused(
                    node, name, "one argument" if name == "abs" else "at least two arguments"
                )
            numbers = (self._operand(argument, name, "number", depth) for argument in arguments)
            return (name, *numbers), "number"
        if not self.scope.per_token:
            return self._changes(node, name)
        if name in ("window", "momentum"):
            return self._steps(node, name, arguments, depth)
        return self._named(node, name, arguments)

    def _named(self, node: ast.expr, name: str, arguments: list[ast.expr]) -> tuple[Expr, Kind | None]:
        """A function of one text: the name of a head, or a piece of output."""
        match arguments:
            case [ast.Constant(value=str()) as argument]:
                text = self.texts[self.start + argument.col_offset]
            case _:
                return self._misused(node, name, "one text in quotes")
        if name in ("head", "threshold"):
            if text in self.scope.heads:
                return (name, text), "number"
            heads = f" (heads: {', '.join(self.scope.heads) or 'none'})"
            return self._refuse(
                argument, f"unknown head {show(text)}{did_you_mean(text, self.scope.heads) or heads}"
            )
        if not 0 < len(text) <= MAX_TEXT:
            return self._refuse(argument, f'the text of "{name}" must have 1 to {MAX_TEXT} characters')
        return (name, text), "condition"

    def _steps(
        self, node: ast.expr, name: str, arguments: list[ast.expr], depth: int
    ) -> tuple[Expr, Kind | None]:
        """A function of what something was at earlier steps."""
        literal: float | None = None
        match arguments:
            case [_, ast.Constant(value=int() as value)] if name == "window" and 1 <= value <= MAX_WINDOW:
                literal = value
            case [_, ast.Constant(value=int() | float() as value)] if name == "momentum" and 0 <= value < 1:
                literal = float(value)
        if literal is None:
            wanted = f"whole number from 1 to {MAX_WINDOW}" if name == "window" else "number in [0, 1)"
            return self._misused(node, name, f"two arguments, the second a {wanted}")
        if self.over_steps:
            return self._refuse(node, f'"{name}" cannot stand inside "{self.over_steps}"')
        self.over_steps = name
        tree, kind = self.read(arguments[0], depth + 1)
        self.over_steps = ""
        return (name, ("bool", tree) if kind == "condition" else tree, literal), "number"

    def _misused(self, node: ast.expr, name: str, wanted: str) -> tuple[Expr, None]:
        return self._refuse(node, f'"{name}" needs {wanted}, as in {FUNCTIONS[name]}')

    def _changes(self, node: ast.expr, name: str) -> tuple[Expr, None]:
        return self._refuse(node, f'"{name}" differs from token to token: use numbers and params only')

    def _refuse(self, node: ast.expr, message: str) -> tuple[Expr, None]:
        self.faults.append(Fault(self.start + node.col_offset, message))
        return _NOTHING, None

    def _segment(self, node: ast.expr) -> str:
        assert node.end_col_offset is not None
        return show(self.line[self.start + node.col_offset : self.start + node.end_col_offset])


_TEXT_FUNCTIONS = "head(...), threshold(...), at(...) or follows(...)"
