"""What windows and momentums hold of a request outlives the workers that computed it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.algorithms.test_declared_signals import PROMPTS, RULES
from tests.algorithms.toys import toy_recipe
from tests.exactness import answers
from tests.faults.chaos import ENGINE
from tests.recipes_python import handoffs
from tests.test_router import Log
from tokenflow import Recipe
from tokenflow.dsl.ir import RecipeIR
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

SOME = {seed: PROMPTS[seed] for seed in range(6)}
LIVES = {"slm": [{"kill_at": 9}, {"die_at": 6}], "llm": [{"die_at": 3}]}


def mortal(
    folder: Path, written: Mapping[str, Any] | Recipe, lives: Mapping[str, list[dict[str, int]]]
) -> RecipeIR:
    """The recipe over toy models whose workers have these lives."""
    folder.mkdir()
    recipe = toy_recipe(folder, written, slm={"salt": 1}, llm={"salt": 2})
    for model in recipe.models:
        plan = {"lives": lives.get(model.name, [])}
        (Path(model.config.path) / "chaos.json").write_text(json.dumps(plan))
    models = tuple(replace(model, config=replace(model.config, engine=ENGINE)) for model in recipe.models)
    return replace(recipe, models=models)


async def traces(recipe: RecipeIR) -> tuple[dict[int, tuple[list[int], list[str]]], Log]:
    """What six requests write and who wrote it, and the steps that workers ran."""
    log = Log()
    async with Router(recipe, observer=log) as router:
        done = await answers(router, SOME, 6, max_tokens=30, ignore_eos=True)
    return {seed: (answer.token_ids, answer.models) for seed, answer in done.items()}, log


@pytest.mark.parametrize("written", [RULES, handoffs.remembering], ids=["rules", "python"])
async def test_a_request_goes_on_from_what_was_remembered(
    tmp_path: Path, written: Mapping[str, Any] | Recipe
) -> None:
    undisturbed, _ = await traces(mortal(tmp_path / "whole", written, {}))
    assert len({tuple(models) for _, models in undisturbed.values()}) == len(SOME)
    disturbed, log = await traces(mortal(tmp_path / "disturbed", written, LIVES))
    assert disturbed == undisturbed
    opens = [(model, opened) for model, step, _ in log.steps for opened in step.open]
    assert len(opens) > len({(model, opened.handle) for model, opened in opens}), "nothing was rebuilt"
    assert any(opened.state for _, opened in opens)
