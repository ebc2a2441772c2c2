"""Random recipes over toy models against the naive reference: anchors, text, states and KV caches agree."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.algorithms.held import watched
from tests.algorithms.toys import EOS, toy_recipe
from tests.reference.reference import Decision, Output, ReferenceModels, Rule, Step, stay
from tests.reference.rules import Budgeted, entropy, latest, mean
from tests.test_router import Log
from tests.toy.engine import toy_logits
from tokenflow.errors import RouteFailed
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

NAMES = ("a", "b", "c", "d")
LENGTH = 24
PROMPTS = [[1, 40, 50, 60 + i] for i in range(5)]


@dataclass(frozen=True)
class Condition:
    """What a recipe says, and the same as a plain function."""

    text: str
    holds: Callable[[Step], bool]


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    n, m = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    x = draw(st.sampled_from([0.1, 0.3, 0.42, 0.5, 0.8]))
    first = draw(
        st.sampled_from(
            [
                Condition(f"draw < {x}", lambda step: step.draw < x),
                Condition(f"token % {m} == 0", lambda step: step.token % m == 0),
                Condition(f"position % {m} == 1", lambda step: step.position % m == 1),
                Condition(f"run_length >= {n}", lambda step: step.run_length >= n),
                Condition(f"entropy > {x}", lambda step: entropy(step.logits) > x),
                Condition(
                    f"window(entropy, {n}) > {x}",
                    lambda step: mean([entropy(each.logits) for each in latest(step, n)]) > x,
                ),
                Condition(f"momentum(token % {m} == 0, 0.5) > {x}", lambda step: momentum(step, m) > x),
            ]
        )
    )
    if draw(st.booleans()):
        return first
    second = draw(conditions())
    if draw(st.booleans()):
        return Condition(
            f"({first.text}) and ({second.text})", lambda step: first.holds(step) and second.holds(step)
        )
    return Condition(
        f"({first.text}) or ({second.text})", lambda step: first.holds(step) or second.holds(step)
    )


def momentum(step: Step, m: int) -> float:
    average = 0.0
    for each in (*step.earlier, step):
        average = 0.5 * average + (0.5 if each.token % m == 0 else 0.0)
    return average


@dataclass(frozen=True)
class Written:
    """Rules in order, by model: condition, destination, whether the token is kept."""

    rules: Mapping[str, list[tuple[Condition, str, bool]]]

    def first(self, draw: float) -> str:
        return NAMES[0]

    def decide(self, step: Step) -> Decision:
        for condition, to, keep in self.rules[step.model]:
            if condition.holds(step):
                return Decision(to, keep, 1.0)
        return stay()


@st.composite
def recipes(draw: st.DrawFn) -> tuple[dict[str, Any], Rule, dict[str, dict[str, Any]]]:
    """A recipe, what it means, and the options of its models."""
    names = NAMES[: draw(st.integers(2, 4))]
    rules = {
        name: [
            (draw(conditions()), draw(st.sampled_from([n for n in names if n != name])), draw(st.booleans()))
            for _ in range(draw(st.integers(0, 3)))
        ]
        for name in names
    }
    recipe: dict[str, Any] = {
        "routes": {
            name: [
                {"when": condition.text, "to": to, "send": "keep" if keep else "drop_last"}
                for condition, to, keep in some
            ]
            for name, some in rules.items()
        },
        "batching": {
            "policy": "fixed",
            "thresholds": {name: draw(st.integers(1, 3)) for name in names},
        },
    }
    reached, todo = {NAMES[0]}, [NAMES[0]]
    while todo:
        new = {to for _, to, _ in rules[todo.pop()]} - reached
        reached |= new
        todo += new
    # What no rule leads to is refused as a mistake.
    names = tuple(name for name in names if name in reached)
    for part in (recipe["routes"], recipe["batching"]["thresholds"], rules):
        for name in set(part) - reached:
            del part[name]
    meaning: Rule = Written(rules)
    if len(names) > 1 and draw(st.booleans()):
        tokens, share = draw(st.integers(0, 6)), draw(st.sampled_from([0.2, 0.5, 1.0]))
        recipe["budgets"] = {names[1]: {"max_tokens": tokens, "max_share": share}}
        meaning = Budgeted(meaning, names[1], share, tokens)
    narrow = {"kv_capacity": 70, "block_size": draw(st.integers(1, 8))} if draw(st.booleans()) else {}
    options = {name: {"salt": salt, **narrow} for salt, name in enumerate(names)}
    return recipe, meaning, options


def reference(options: Mapping[str, Mapping[str, Any]]) -> ReferenceModels:
    def model(salt: int) -> Any:
        return lambda ids: Output(toy_logits(ids, 128, salt), torch.zeros(4))

    return ReferenceModels(
        {name: model(given["salt"]) for name, given in options.items()}, 100, frozenset({EOS})
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes())
async def test_any_recipe_does_what_a_naive_loop_does(
    made: tuple[dict[str, Any], Rule, dict[str, dict[str, Any]]],
) -> None:
    recipe, meaning, options = made
    models, log = reference(options), Log()
    expected: dict[int, Any] = {}
    for seed, prompt in enumerate(PROMPTS):
        try:
            expected[seed] = models.run(meaning, prompt, LENGTH, seed=seed)
        except RuntimeError:
            expected[seed] = "livelock"
    with tempfile.TemporaryDirectory() as folder, watched():
        compiled = toy_recipe(Path(folder), recipe, **options)
        async with Router(compiled, observer=log) as router:
            got = await outcomes(router)
            await log.until(lambda: not log.open_handles)
    for seed, trace in expected.items():
        if trace == "livelock":
            assert isinstance(got[seed], RouteFailed)
            assert "would bounce for ever" in str(got[seed])
            continue
        answer = got[seed]
        assert not isinstance(answer, Exception), answer
        assert (answer.token_ids, answer.models) == (list(trace.tokens), list(trace.models))
        assert answer.finish_reason == trace.finish_reason
        assert (answer.usage.handoffs, answer.usage.dropped) == (trace.handoffs, trace.dropped)


async def outcomes(router: Router) -> dict[int, Any]:
    got: dict[int, Any] = {}

    async def ask(seed: int) -> None:
        try:
            got[seed] = await router.generate(PROMPTS[seed], max_tokens=LENGTH, seed=seed)
        except RouteFailed as error:
            got[seed] = error

    async with anyio.create_task_group() as tasks:
        for seed in range(len(PROMPTS)):
            tasks.start_soon(ask, seed)
    return got
