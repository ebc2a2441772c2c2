"""Recipes as somebody writes them, over toy engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.recipes import DEMO, toy_model
from tokenflow import Recipe
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe

EOS = 2


def toy_recipe(
    folder: Path, recipe: Mapping[str, Any] | Recipe, overrides: tuple[str, ...] = (), **options: Any
) -> RecipeIR:
    """The recipe with a toy engine in place of each model; its ``options`` go by the model's name.

    In a mapping ``models`` may be left out: they are those that have options.
    """
    if not isinstance(recipe, Recipe):
        recipe = {"name": "toy", "models": {key: {} for key in options}, **recipe}
        models = {name: {"path": str(DEMO / "small"), **model} for name, model in recipe["models"].items()}
        recipe = {"entry": next(iter(models)), **recipe, "models": models}
        if "draw" in recipe:
            del recipe["entry"]
    compiled = load_recipe(recipe, overrides)
    made = []
    for model in compiled.models:
        toy = toy_model(folder, model.name, model.code, **options.get(model.name, {})).config
        made.append(replace(model, config=replace(model.config, path=toy.path, engine=toy.engine)))
    return replace(compiled, models=tuple(made))
