"""Expression trees: walked, changed and written out again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import cast

from tokenflow.dsl.ir import Expr

_LEAVES = frozenset({"number", "boolean", "signal", "param", "head", "threshold", "at", "follows"})
_OR, _AND, _NOT, _COMPARED, _SUM, _PRODUCT, _SIGNED, _ATOM = range(8)
_LEVELS = {
    "or": _OR,
    "and": _AND,
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), _COMPARED),
    **dict.fromkeys(("+", "-"), _SUM),
    **dict.fromkeys(("*", "/", "%"), _PRODUCT),
}


def walk(tree: Expr) -> Iterator[Expr]:
    """The tree and everything in it, outermost first."""
    yield tree
    for part in _parts(tree):
        yield from walk(part)


def rewrite(tree: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The tree with every leaf replaced by what ``change`` makes of it."""
    if tree[0] in _LEAVES:
        return change(tree)
    return tuple(rewrite(part, change) if isinstance(part, tuple) else part for part in tree)


def write(tree: Expr) -> str:
    """The text that :mod:`tokenflow.dsl.expr` reads as this tree."""
    return _write(tree, _OR)


def _parts(tree: Expr) -> list[Expr]:
    return [] if tree[0] in _LEAVES else [part for part in tree if isinstance(part, tuple)]


def _write(tree: Expr, level: int) -> str:
    """Write an operand of something that binds as tightly as ``level``."""
    text, own = _operation(tree)
    return f"({text})" if own < level else text


def _operation(tree: Expr) -> tuple[str, int]:
    """A tree's text and how tightly it holds together."""
    node, *arguments = tree
    if node in ("number", "signal", "param"):
        return str(arguments[0]), _ATOM
    if node == "boolean":
        return str(arguments[0]).lower(), _ATOM
    if node in _LEAVES:
        return f"{node}({json.dumps(arguments[0], ensure_ascii=False)})", _ATOM
    parts = _parts(tree)
    if node == "bool":
        return _write(parts[0], _OR), _ATOM
    if node == "not":
        return f"not {_write(parts[0], _NOT)}", _NOT
    if node == "neg":
        return f"-{_write(parts[0], _SIGNED)}", _SIGNED
    level = _LEVELS.get(cast(str, node))
    if level is None:
        rest = [_write(part, _OR) if isinstance(part, tuple) else str(part) for part in arguments]
        return f"{node}({', '.join(rest)})", _ATOM
    # Sums and products are read from the left; what stands to the right of the sign needs brackets sooner.
    first = level if level in (_SUM, _PRODUCT) else level + 1
    operands = [_write(parts[0], first), *(_write(part, level + 1) for part in parts[1:])]
    return f" {node} ".join(operands), level
