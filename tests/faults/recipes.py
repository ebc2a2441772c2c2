"""The pair of toy models of the router's tests, with faults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.chaos import ENGINE
from tests.recipes import toy_pair
from tokenflow.dsl.ir import RecipeIR

Lives = Sequence[Mapping[str, Any]]


def chaos_pair(folder: Path, slm: Lives = (), llm: Lives = (), **settings: Any) -> RecipeIR:
    """:func:`tests.recipes.toy_pair`, its workers with these faults; ``settings`` are of both models."""
    recipe = toy_pair(folder)
    for model, lives in zip(recipe.models, (slm, llm), strict=True):
        (Path(model.config.path) / "chaos.json").write_text(json.dumps({"lives": lives}))
    models = tuple(
        replace(model, config=replace(model.config, engine=ENGINE, **settings)) for model in recipe.models
    )
    return replace(recipe, models=models)


def books(recipe: RecipeIR) -> list[dict[str, int]]:
    """What each model's engine holds now: ``open`` slots and ``tokens``."""
    return [json.loads((Path(model.config.path) / "books").read_text()) for model in recipe.models]
