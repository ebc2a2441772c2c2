"""What YAML says in short, written out as rules over expressions: one mechanism serves all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from tokenflow.dsl.ir import Expr, RuleIR, Send
from tokenflow.dsl.schema import Rule
from tokenflow.dsl.tree import write
from tokenflow.dsl.weights import ends

_DRAW: Expr = ("signal", "draw")


def rule(shape: Rule, when: Expr | None) -> RuleIR:
    """A rule with its conditions joined: ``when`` as parsed (None if not given), ``after`` and ``at``."""
    if when is not None and not shape.after and not shape.at:
        return RuleIR(when, shape.to, shape.send, " ".join(shape.when.split()))
    conditions: list[Expr] = []
    if when is not None:
        conditions += cast("tuple[Expr, ...]", when[1:]) if when[0] == "and" else [when]
    if shape.after:
        conditions.append((">=", ("signal", "run_length"), ("number", shape.after)))
    if shape.at:
        conditions.append(("at", shape.at))
    return _rule(conditions, shape.to, shape.send)


def draw_rules(models: Iterable[str], weights: Mapping[str, Expr]) -> dict[str, tuple[RuleIR, ...]]:
    """The rules of an ensemble, by model: after each token, who writes the next one is drawn.

    The unit interval is cut into a piece for each model, in their order and as long as the model's share of
    the weights; the next writer is the one whose piece holds ``draw`` (arXiv 2605.00419: to sample a model
    and then a token of it is to sample from the weighted mixture of their distributions).

    :param weights: by model, without those that never write.
    """
    between = ends(list(weights.values()))
    pieces = zip(weights, [None, *between], [*between, None], strict=True)
    rules = {name: _rule(_piece(low, high), name, "keep") for name, low, high in pieces}
    return {here: tuple(rule for name, rule in rules.items() if name != here) for here in models}


def _piece(low: Expr | None, high: Expr | None) -> list[Expr]:
    return [
        *([] if low is None else [("<=", low, _DRAW)]),
        *([] if high is None else [("<", _DRAW, high)]),
    ]


def _rule(conditions: list[Expr], to: str, send: Send) -> RuleIR:
    first, *others = conditions or [("boolean", True)]
    when = ("and", first, *others) if others else first
    return RuleIR(when, to, send, write(when))
