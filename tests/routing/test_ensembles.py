"""The rules of an ensemble, and routing by heads, as compiled in a worker."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.routing.test_rules import Head
from tokenflow.dsl.expr import parse_condition
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.dsl.weights import first_writer
from tokenflow.errors import ModelLoadError
from tokenflow.routing.rules import compile_rules
from tokenflow.routing.signals import Signals
from tokenflow.wire.messages import RouteRule

NAMES = ("a", "b", "c", "d")


def mixed(**draw: float | str) -> RecipeIR:
    models = {name: f"owner/{name}" for name in draw}
    return load_recipe({"name": "mixed", "params": {"w": 0.2, "v": 0.1}, "models": models, "draw": draw})


def next_writers(recipe: RecipeIR, numbers: list[float], params: Mapping[str, float]) -> list[list[str]]:
    """Who writes next after each model, for each random number."""
    found = []
    for here in recipe.models:
        rules = recipe.routes[here.name]
        compiled = compile_rules([RouteRule(rule.when, recipe.model(rule.to).code) for rule in rules], params)
        signals = Signals(
            logits=torch.zeros(len(numbers), 2),
            tokens=torch.zeros(len(numbers), dtype=torch.int64),
            params={name: torch.full((len(numbers),), value) for name, value in params.items()},
            draws=torch.tensor(numbers, dtype=torch.float64),
        )
        found.append([rules[i].to if i >= 0 else here.name for i in compiled(signals)])
    return found


WEIGHTS: list[dict[str, Any]] = [
    {"a": 0.5, "b": 0.3, "c": 0.2},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"a": 0.1, "b": 0.2, "c": 0.7, "d": 0},
    {"a": 0, "b": 1, "c": 0},
    {"a": 1e-9, "b": 1, "c": 1e30},
    {"a": "w", "b": "1 - w"},
    {"a": "w", "b": "v", "c": "1 - w - v", "d": "w * v"},
    {"a": "w - w", "b": "v", "c": "w"},
    {"a": "v * v / max(v, 1e-30)", "b": "v"},
    {"a": "1 - w", "b": 0.1, "c": "(16777217 + v) % 3 + 0.1", "d": "max(w, 0.1, v) * 3 % 2"},
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_model_agrees_on_who_writes_next(weights: dict[str, Any]) -> None:
    recipe = mixed(**weights)
    source = random.Random(3)
    ends = [0.0, 0.1, 0.2, 0.25, 1 / 3, 0.3, 0.5, 0.75, 0.8, 2 / 3, 1.0]
    near = [math.nextafter(end, to) for end in ends for to in (0, 1)]
    numbers = [x for x in (*ends, *near, *(source.random() for _ in range(500))) if 0 <= x < 1]
    for params in (
        {"w": 0.2, "v": 0.1},
        {"w": 0.0, "v": 1.0},
        {"w": 0.3333, "v": 1e-30},
        {"w": 0.7, "v": 0.2},
    ):
        after_each = next_writers(recipe, numbers, params)
        agreed = after_each[0]
        assert all(writers == agreed for writers in after_each)
        first = [first_writer(recipe, params, number) for number in numbers]
        assert agreed == first


def test_models_write_as_often_as_they_weigh() -> None:
    numbers = [(i + 0.5) / 10_000 for i in range(10_000)]
    writers = next_writers(mixed(a=5, b="w * 15", c=2), numbers, {"w": 0.2, "v": 0.1})[1]
    counts = [writers.count(name) for name in "abc"]
    assert counts == [pytest.approx(5000, abs=1), pytest.approx(3000, abs=1), pytest.approx(2000, abs=1)]


def test_a_model_without_weight_never_writes_and_hands_on_what_it_has() -> None:
    writers = next_writers(mixed(a=0.5, b=0, c=0.5), [0.0, 0.4, 0.5, 0.9], {"w": 0.0, "v": 0.0})
    assert writers == [["a", "a", "c", "c"]] * 3


def test_draws_compare_in_double() -> None:
    rules = compile_rules([RouteRule(parse_condition("draw < 0.1"), 1)], ())
    draws = torch.tensor([0.1, math.nextafter(0.1, 0)], dtype=torch.float64)
    signals = Signals(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), draws=draws)
    assert rules(signals) == [-1, 0]


def gate(text: str, heads: Mapping[str, Any]) -> list[int]:
    """Which of three rows fires; a head's score of them is 0.25, 0.5, 0.75."""
    rules = compile_rules([RouteRule(parse_condition(text, (), heads), 1)], (), heads)
    hidden = torch.tensor([[0.25, 1], [0.5, 1], [0.75, 1]], dtype=torch.bfloat16)
    signals = Signals(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), hidden=hidden)
    return rules(signals)


def test_a_head_scores_the_rows_and_its_threshold_decides() -> None:
    heads = {"gate": Head(0, 0.5)}
    assert gate('head("gate") >= threshold("gate")', heads) == [-1, 0, 0]
    assert gate('head("gate") > threshold("gate")', heads) == [-1, -1, 0]


def test_a_threshold_that_nobody_gives_is_an_error_that_says_where_to_give_it() -> None:
    with pytest.raises(ModelLoadError) as caught:
        gate('head("gate") >= threshold("gate")', {"gate": Head(0, None)})
    assert str(caught.value) == (
        "no threshold is stored with head 'gate': give one in the recipe, heads.gate.threshold"
    )
    assert gate('head("gate") >= 0.5', {"gate": Head(0, None)}) == [-1, 0, 0]


def test_a_head_is_asked_once_per_step_and_with_raw_logits() -> None:
    seen = []

    class Watched(Head):
        def score(self, hidden: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            seen.append((hidden, tokens, logits))
            return super().score(hidden, tokens, logits)

    heads = {"gate": Watched(0, 0.5)}
    trees = [
        parse_condition(text, (), heads)
        for text in ('head("gate") > 2', 'head("gate") > 1', 'head("gate") > 0.5')
    ]
    rules = compile_rules([RouteRule(tree, 1) for tree in trees], (), heads)
    logits, tokens, hidden = torch.randn(1, 4), torch.tensor([3]), torch.tensor([[0.75]])
    assert rules(Signals(logits, tokens, hidden=hidden, excluded=torch.tensor([2]))) == [2]
    ((given_hidden, given_tokens, given_logits),) = seen
    assert (given_hidden is hidden, given_tokens is tokens, given_logits is logits) == (True, True, True)
