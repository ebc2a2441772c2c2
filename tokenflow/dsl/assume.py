"""What a recipe says of its models' speed and routing before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.weights import evaluate
from tokenflow.errors import PlanError
from tokenflow.wire.messages import Destination

if TYPE_CHECKING:
    from tokenflow.planner import RoutingModel

_QUANTUM_MS, _FEWEST_QUANTA = 0.1, 10
"""What latencies are rounded to, unless the fastest step takes less than so many of it."""


def destinations(recipe: RecipeIR, name: str) -> tuple[Destination, ...]:
    """Where requests go that leave a simulated model, in recipe order, with their shares."""
    numbers = {param: index for index, param in enumerate(recipe.params)}
    shares = _simulated_shares(recipe, name) or {}
    found = []
    for model in recipe.models:
        rules = [rule for rule in recipe.routes.get(name, ()) if rule.to == model.name]
        if model.name == name or (not rules and model.name not in shares):
            continue
        share = shares.get(model.name, 0.0)
        found.append(
            Destination(
                code=model.code,
                name=model.name,
                share=0.0 if isinstance(share, str) else share,
                param=numbers[share] if isinstance(share, str) else -1,
                rule=recipe.routes[name].index(rules[0]) if rules else -1,
                keep=not rules or rules[0].send == "keep",
            )
        )
    return tuple(found)


def assumed_model(recipe: RecipeIR, params: Mapping[str, float] | None = None) -> RoutingModel:
    """The routing model that the recipe describes: what it assumes, and what it simulates.

    Its models are those that a request can reach, in recipe order.

    :param params: other values for the recipe's parameters.
    :raises PlanError: naming all that the recipe leaves out.
    """
    from tokenflow.planner import RoutingModel

    names = recipe.reachable()
    if missing := unknown(recipe):
        raise PlanError(
            f"recipe {recipe.name!r} does not say {' or '.join(missing)}: give it under batching.assume, or "
            "measure it (tokenflow plan --measure)"
        )
    values = {**recipe.params, **(params or {})}
    routing, commits = [], []
    for name in names:
        given = _shares(recipe, name) or {}
        shares = {to: values[share] if isinstance(share, str) else share for to, share in given.items()}
        stay = 1 - sum(shares.values())
        routing.append([stay if to == name else shares.get(to, 0.0) for to in names])
        commits.append([_commits(recipe, name, to) for to in names])
    latencies = [dict(_latency_ms(recipe, name)) for name in names]
    fastest = min(value for table in latencies for value in table.values())
    quantum_ms = min(_QUANTUM_MS, fastest / _FEWEST_QUANTA)
    return RoutingModel(routing, commits, latencies, quantum_ms, entry=names.index(recipe.entry))


def unknown(recipe: RecipeIR) -> list[str]:
    """What the recipe would have to say to be planned with, in words; nothing if it says enough."""
    names = recipe.reachable()
    slow = [f"how long a step of {name} takes" for name in names if not _latency_ms(recipe, name)]
    astray = [f"where {name} leads" for name in names if _shares(recipe, name) is None]
    return slow + astray


def _latency_ms(recipe: RecipeIR, name: str) -> tuple[tuple[int, float], ...]:
    return recipe.batching.assume.latency_ms.get(name) or recipe.model(name).config.latency_ms


def _shares(recipe: RecipeIR, name: str) -> Mapping[str, float | str] | None:
    """Shares of steps by destination; None if the recipe says nothing of them."""
    assumed = recipe.batching.assume.routing.get(name)
    return assumed if assumed is not None else _simulated_shares(recipe, name)


def _simulated_shares(recipe: RecipeIR, name: str) -> Mapping[str, float | str] | None:
    config = recipe.model(name).config
    if config.routing:
        return config.routing
    if recipe.draw:
        weights = {to: evaluate(tree, recipe.params) for to, tree in recipe.draw}
        return {to: weight / sum(weights.values()) for to, weight in weights.items() if to != name}
    python = recipe.python.get(name)
    leads = recipe.routes.get(name) or (python is not None and python.routes)
    return None if leads else {}


def _commits(recipe: RecipeIR, name: str, to: str) -> float:
    """Output tokens that a step at ``name`` commits when the request goes on to ``to``."""
    given = recipe.batching.assume.commits.get(name, {})
    if to in given:
        return given[to]
    rules = [rule for rule in recipe.routes.get(name, ()) if rule.to == to]
    return 0.0 if rules and rules[0].send == "drop_last" else 1.0
