"""What is no error in a recipe, but hardly meant: rules that never fire, requests that bounce for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import cast

from tokenflow.dsl.ir import Expr, RecipeIR, RuleIR
from tokenflow.errors import Problem

_RANGES: Mapping[str, tuple[float, float]] = {
    "entropy": (0, 1),
    "entropy_nats": (0, inf),
    "confidence": (0, 1),
    "margin": (0, 1),
    "logprob": (-inf, 0),
    "token": (0, inf),
    "position": (0, inf),
    "run_length": (1, inf),
    "draw": (0, 1),
}
"""The least and the largest value of every signal."""
_MIRRORED = {">": "<", ">=": "<="}


def doubts(recipe: RecipeIR) -> tuple[Problem, ...]:
    """Warnings about a recipe that is right: first of its rules, in their order, then of where they lead."""
    if recipe.draw:
        return ()
    idle = [doubt for name, rules in recipe.routes.items() for doubt in _idle_rules(recipe, name, rules)]
    return (*idle, *_bounces(recipe))


def truth(tree: Expr) -> bool | None:
    """Whether a condition holds after every token (True) or after none (False); None if that depends."""
    node, *arguments = cast("tuple[str, *tuple[Expr, ...]]", tree)
    if node == "boolean":
        return bool(arguments[0])
    if node == "not":
        inner = truth(arguments[0])
        return None if inner is None else not inner
    if node in ("and", "or"):
        parts, decides = [truth(part) for part in arguments], node == "or"
        return decides if decides in parts else None if None in parts else not decides
    if node in ("<", "<=", ">", ">=", "==", "!="):
        left, right = map(_bounds, arguments)
        return _compared(_MIRRORED[node], right, left) if node in _MIRRORED else _compared(node, left, right)
    return None


def _compared(node: str, left: tuple[float, float], right: tuple[float, float]) -> bool | None:
    """What a comparison gives for all numbers within bounds."""
    (low, high), (least, most) = left, right
    apart = high < least or most < low
    one = low == high == least == most
    always, never = {
        "<": (high < least, low >= most),
        "<=": (high <= least, low > most),
        "==": (one, apart),
        "!=": (apart, one),
    }[node]
    return True if always else False if never else None


def _bounds(tree: Expr) -> tuple[float, float]:
    """The least and the largest value of a number, infinite where nothing is known of it."""
    node, *arguments = tree
    if node == "number":
        return (float(cast(float, arguments[0])),) * 2
    if node == "neg":
        low, high = _bounds(cast(Expr, arguments[0]))
        return -high, -low
    return _RANGES[cast(str, arguments[0])] if node == "signal" else (-inf, inf)


def _idle_rules(recipe: RecipeIR, name: str, rules: tuple[RuleIR, ...]) -> Iterator[Problem]:
    """Rules of a model that never fire."""
    before: dict[Expr, int] = {}
    for index, rule in enumerate(rules):
        first = before.setdefault(rule.when, index)
        always = next((earlier for tree, earlier in before.items() if earlier < index and truth(tree)), None)
        why = ""
        if always is not None:
            why = f"rule {always + 1} of {name} always fires before it"
        elif first < index:
            why = f"rule {first + 1} of {name} has the same condition, and comes first"
        elif truth(rule.when) is False:
            why = "its condition never holds"
        elif _waits(rule.when) > _longest_draft(recipe, name):
            why = (
                f"{recipe.verifier} checks before it, since at most {recipe.rollback} tokens may be tentative"
            )
        if why:
            yield recipe.notes.problem(("routes", name, index), f"never fires: {why}", "warning")


def _longest_draft(recipe: RecipeIR, name: str) -> float:
    """How many tokens a model can write before another one has to check them."""
    drafts = recipe.verifier not in ("", name, *recipe.budgets)
    return recipe.rollback if drafts else inf


def _waits(tree: Expr) -> float:
    """How many tokens a condition waits for, as ``after: n`` is written out."""
    node, *arguments = tree
    if node == "and":
        return max(_waits(cast(Expr, part)) for part in arguments)
    if node == ">=" and arguments[0] == ("signal", "run_length"):
        return _bounds(cast(Expr, arguments[1]))[0]
    return 0


def _bounces(recipe: RecipeIR) -> Iterator[Problem]:
    """Circles of models each of which always drops its token and hands over: whoever gets there is lost."""
    leads = {name: to for name in recipe.routes if (to := _always_drops(recipe, name))}
    told: set[str] = set()
    for start in leads:
        path = [start]
        while path[-1] in leads and leads[path[-1]] not in path:
            path.append(leads[path[-1]])
        if path[-1] in leads and leads[path[-1]] == start and told.isdisjoint(path):
            told.update(path)
            circle = " to ".join((*path, start))
            message = (
                f"requests bounce for ever from {circle}: each drops its token, so nothing is ever written"
            )
            yield recipe.notes.problem(("routes", start), message, "warning")


def _always_drops(recipe: RecipeIR, name: str) -> str:
    """The model that gets every request from a model that keeps no token; empty if it may keep one."""
    if name in recipe.budgets or recipe.model(name).config.verify:
        return ""
    for rule in recipe.routes[name]:
        holds = truth(rule.when)
        if holds is not False:
            return rule.to if holds and rule.send == "drop_last" and rule.to not in recipe.budgets else ""
    return ""
