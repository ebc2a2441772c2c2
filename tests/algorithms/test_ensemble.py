"""An ensemble that draws who writes each token samples from the weighted mixture of its models."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from tests.algorithms.toys import toy_recipe
from tests.exactness import answers
from tests.toy.engine import scripted_logits
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.weights import first_writer
from tokenflow.engines.sampling import Draw, Sampler
from tokenflow.random import DRAW, uniform
from tokenflow.router import Router
from tokenflow.routing.rules import compile_rules
from tokenflow.routing.signals import Signals
from tokenflow.types import SamplingParams
from tokenflow.wire.messages import RouteRule

pytestmark = pytest.mark.anyio

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
LOGITS = {"a": [2.0, 1.0, 0.0, -1.0, 0.5], "b": [-1.0, 0.0, 2.5, 0.0, 1.0], "c": [0.0, 0.0, 0.0, 3.0, -2.0]}
"""A toy engine's next-token logits, whatever came before, over a vocabulary of five."""
SURE = 0.001
"""Below this probability of a deviation, distributions are held to be different."""


def mixture(weights: Mapping[str, float]) -> list[float]:
    total = sum(weights.values())
    parts = [
        weight / total * torch.tensor(LOGITS[name]).double().softmax(-1) for name, weight in weights.items()
    ]
    return list(sum(parts, torch.zeros(5, dtype=torch.float64)).tolist())


def p_value(tokens: list[int], expected: list[float]) -> float:
    counts = [tokens.count(token) for token in range(len(expected))]
    assert sum(counts) == len(tokens), "a token beyond the five"
    return float(stats.chisquare(counts, [len(tokens) * p for p in expected]).pvalue)


def ensemble(folder: Path, weights: Mapping[str, float], logits: Mapping[str, list[float]]) -> RecipeIR:
    return toy_recipe(
        folder, {"draw": dict(weights)}, **{name: {"script": [logits[name]]} for name in weights}
    )


def sampled(
    recipe: RecipeIR, logits: Mapping[str, list[float]], requests: int, length: int
) -> list[list[int]]:
    """Tokens of many requests by position, by the samplers and rules of the workers."""
    params = SamplingParams(temperature=1.0)
    samplers, chooses = {}, {}
    for model in recipe.models:
        samplers[model.name] = Sampler(model.code, 100, (2,))
        rules = [RouteRule(rule.when, recipe.model(rule.to).code) for rule in recipe.routes[model.name]]
        chooses[model.name] = compile_rules(rules, ())
    writers = [first_writer(recipe, {}, uniform(seed, 0, 0, 0, DRAW)) for seed in range(requests)]
    columns = []
    for position in range(length):
        column, following = [0] * requests, list(writers)
        for model in recipe.models:
            rows = [seed for seed, writer in enumerate(writers) if writer == model.name]
            if not rows:
                continue
            batch = scripted_logits(logits[model.name], 128).expand(len(rows), -1)
            draws = [Draw(params, seed, [0] * (1 + position), 1) for seed in rows]
            tokens = [result.token for result in samplers[model.name](batch, draws)]
            numbers = [uniform(seed, 0, position + 1, 0, DRAW) for seed in rows]
            signals = Signals(batch, torch.tensor(tokens), draws=torch.tensor(numbers, dtype=torch.float64))
            fired = chooses[model.name](signals)
            for seed, token, rule in zip(rows, tokens, fired, strict=True):
                column[seed] = token
                if rule >= 0:
                    following[seed] = recipe.routes[model.name][rule].to
        columns.append(column)
        writers = following
    return columns


def test_200_000_tokens_are_distributed_as_the_mixture_is_and_not_as_another(tmp_path: Path) -> None:
    columns = sampled(ensemble(tmp_path, WEIGHTS, LOGITS), LOGITS, requests=20_000, length=10)
    tokens = [token for column in columns for token in column]
    assert len(tokens) == 200_000
    assert p_value(tokens, mixture(WEIGHTS)) > SURE
    assert p_value(columns[0], mixture(WEIGHTS)) > SURE
    for wrong in ((0.49, 0.31, 0.2), (0.5, 0.29, 0.21), (1, 1, 1)):
        assert p_value(tokens, mixture(dict(zip(WEIGHTS, wrong, strict=True)))) < SURE
    # A first token that always came from one model would show.
    assert p_value(columns[0], mixture({"a": 1, "b": 0, "c": 0})) < SURE
    # Tokens that follow each other are independent, as draws from one mixture are.
    pairs = [[0] * 5 for _ in range(5)]
    for before, after in pairwise(columns):
        for first, second in zip(before, after, strict=True):
            pairs[first][second] += 1
    assert stats.chi2_contingency(pairs).pvalue > SURE


def test_equal_weights_over_identical_models_sample_as_one_model_does(tmp_path: Path) -> None:
    same = dict.fromkeys("abc", LOGITS["a"])
    recipe = ensemble(tmp_path, {"a": 1, "b": 1, "c": 1}, same)
    columns = sampled(recipe, same, requests=5_000, length=4)
    tokens = [token for column in columns for token in column]
    assert p_value(tokens, mixture({"a": 1})) > SURE
    assert p_value(tokens, mixture({"b": 1})) < SURE


async def test_a_router_samples_from_the_mixture(tmp_path: Path) -> None:
    recipe = ensemble(tmp_path, WEIGHTS, LOGITS)
    request: dict[str, Any] = {"max_tokens": 25, "temperature": 1.0, "ignore_eos": True}
    async with Router(recipe) as router:
        completions = await answers(router, {seed: [1] for seed in range(240)}, 48, **request)
    tokens = [token for completion in completions.values() for token in completion.token_ids]
    writers = [model for completion in completions.values() for model in completion.models]
    assert len(tokens) == 6_000
    assert p_value(tokens, mixture(WEIGHTS)) > SURE
    assert p_value(tokens, mixture({"a": 1, "b": 1, "c": 1})) < SURE
    shares = stats.chisquare(
        [writers.count(name) for name in WEIGHTS], [6_000 * weight for weight in WEIGHTS.values()]
    )
    assert shares.pvalue > SURE
