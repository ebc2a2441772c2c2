"""Budgets: what a model may write of one response, at every moment of it, and that the response goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.algorithms.toys import toy_recipe
from tests.exactness import answers
from tokenflow.errors import RecipeError
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

PROMPTS = {seed: [1, 40, 50, 20 + seed] for seed in range(8)}
LENGTH = 40
STITCH = {
    "routes": {
        "slm": [{"when": "entropy > 0.35", "to": "llm", "send": "drop_last"}],
        "llm": [{"when": "entropy <= 0.3", "to": "slm", "send": "keep"}],
    }
}
ALWAYS_AWAY = {
    "routes": {
        "slm": [{"when": "true", "to": "llm", "send": "keep"}],
        "llm": [{"when": "false", "to": "slm", "send": "keep"}],
    }
}


def assert_within(writers: list[str], model: str, share: float = 1.0, tokens: int = LENGTH) -> None:
    for length in range(1, len(writers) + 1):
        written = writers[:length].count(model)
        assert written <= tokens
        assert written <= share * length, f"{written} of the first {length}"


async def written(recipe: Any, **request: Any) -> list[list[str]]:
    async with Router(recipe) as router:
        completions = await answers(router, PROMPTS, 8, max_tokens=LENGTH, ignore_eos=True, **request)
    assert {len(completion.tokens) for completion in completions.values()} == {LENGTH}
    return [completion.models for completion in completions.values()]


@pytest.mark.parametrize("rules", [STITCH, ALWAYS_AWAY])
@pytest.mark.parametrize(
    "budget",
    [
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": 7},
        {"max_share": 0.0},
        {"max_share": 0.1},
        {"max_share": 0.5},
        {"max_share": 0.3, "max_tokens": 5},
    ],
)
async def test_a_budget_is_never_exceeded_and_used_where_it_can_be(
    tmp_path: Path, rules: dict[str, Any], budget: dict[str, float]
) -> None:
    recipe = toy_recipe(tmp_path, {**rules, "budgets": {"llm": budget}}, slm={"salt": 1}, llm={"salt": 2})
    share, tokens = budget.get("max_share", 1.0), int(budget.get("max_tokens", LENGTH))
    most = min(tokens, int(share * LENGTH))
    for writers in await written(recipe):
        assert_within(writers, "llm", share, tokens)
        if rules is ALWAYS_AWAY:
            assert most - 1 <= writers.count("llm") <= most


@pytest.mark.parametrize("hundredths", [29, 57, 58])
async def test_a_share_is_what_is_written(tmp_path: Path, hundredths: int) -> None:
    """0.29 * 100 is less than 29 in floats, and 29 tokens of 100 are 0.29 of them."""
    assert hundredths / 100 * 100 < hundredths
    rewritten = {
        "routes": {"slm": [{"when": "true", "to": "llm", "send": "drop_last"}]},
        "budgets": {"llm": {"max_share": hundredths / 100}},
    }
    recipe = toy_recipe(tmp_path, rewritten, slm={"salt": 1}, llm={"salt": 2})
    async with Router(recipe) as router:
        answer = await router.generate(PROMPTS[0], max_tokens=100, ignore_eos=True)
    assert answer.models.count("llm") == hundredths


async def test_each_model_of_a_chain_has_its_own_budget(tmp_path: Path) -> None:
    recipe = toy_recipe(
        tmp_path,
        {
            "routes": {
                "slm": [{"after": 1, "to": "mid", "send": "keep"}],
                "mid": [{"after": 2, "to": "llm", "send": "keep"}],
                "llm": [{"after": 3, "to": "mid", "send": "keep"}],
            },
            "budgets": {"mid": {"max_share": 0.4}, "llm": {"max_tokens": 4}},
        },
        **{name: {"salt": salt} for salt, name in enumerate(("slm", "mid", "llm"))},
    )
    for writers in await written(recipe):
        assert_within(writers, "mid", share=0.4)
        assert_within(writers, "llm", tokens=4)
        assert {"slm", "mid", "llm"} == set(writers)


@pytest.mark.parametrize("budget", [{"max_share": 0.2}, {"max_tokens": 3}, {"max_tokens": 0}])
async def test_an_ensemble_keeps_to_budgets_from_its_first_token_on(
    tmp_path: Path, budget: dict[str, float]
) -> None:
    """The first writer is drawn too, and may be a model that has no budget left."""
    recipe = toy_recipe(
        tmp_path,
        {"draw": {"slm": 0.4, "llm": 0.6}, "budgets": {"llm": budget}},
        slm={"salt": 1},
        llm={"salt": 2},
    )
    for writers in await written(recipe):
        assert_within(writers, "llm", budget.get("max_share", 1.0), int(budget.get("max_tokens", LENGTH)))


async def test_a_model_that_checks_may_have_a_budget_of_tokens(tmp_path: Path) -> None:
    """Once it is used up, drafts become final unchecked."""
    recipe = {
        "rollback": 3,
        "models": {"slm": {}, "llm": {"verify": True}},
        "routes": {
            "slm": [{"after": 3, "to": "llm", "send": "keep"}],
            "llm": [{"after": 1, "to": "slm", "send": "keep"}],
        },
        "budgets": {"llm": {"max_tokens": 5}},
    }
    for writers in await written(toy_recipe(tmp_path, recipe, slm={"salt": 1}, llm={"salt": 2})):
        assert writers.count("llm") == 5
        assert set(writers[-20:]) == {"slm"}
    with pytest.raises(RecipeError, match="takes tokens of others back has no bound to its share"):
        toy_recipe(tmp_path, {**recipe, "budgets": {"llm": {"max_share": 0.5}}}, slm={}, llm={})


async def test_a_budget_holds_for_each_request_by_itself(tmp_path: Path) -> None:
    recipe = toy_recipe(
        tmp_path, {**ALWAYS_AWAY, "budgets": {"llm": {"max_tokens": 7}}}, slm={"salt": 1}, llm={"salt": 2}
    )
    for writers in await written(recipe):
        assert writers == ["slm"] + ["llm"] * 7 + ["slm"] * (LENGTH - 8)
