"""The YAML front end: a recipe file, or the same as data, to the frozen form that is run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tokenflow.dsl.check import Conditions, check
from tokenflow.dsl.ir import BatchingIR, ModelIR, RecipeIR, RuleIR
from tokenflow.dsl.overrides import apply_overrides
from tokenflow.dsl.paths import model_path
from tokenflow.dsl.schema import Recipe, validate
from tokenflow.dsl.source import Document, read_file, read_mapping
from tokenflow.errors import RecipeError
from tokenflow.types import ModelConfig


def load_recipe(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()
) -> RecipeIR:
    """Load a recipe and check all of it.

    :param source: a YAML file, or a mapping of the same shape.
    :param overrides: changes as ``key.path=value``, applied in order before anything is checked.
    :raises RecipeError: with every problem found.
    """
    if isinstance(source, Mapping):
        document, name = read_mapping(source), ""
    else:
        document, name = read_file(source), os.fspath(source)
    apply_overrides(document, overrides)
    recipe = validate(document)
    conditions = check(document)
    if document.problems:
        raise RecipeError(
            sorted(document.problems, key=lambda problem: (not problem.line, problem.line, problem.column))
        )
    assert recipe is not None
    return _compile(document, recipe, conditions, name)


def _compile(document: Document, recipe: Recipe, conditions: Conditions, source: str) -> RecipeIR:
    models = tuple(
        ModelIR(name, code, ModelConfig(**{**model.model_dump(), "path": _path(document, name, model.path)}))
        for code, (name, model) in enumerate(recipe.models.items(), start=1)
    )
    routes = {
        name: tuple(
            RuleIR(conditions[name, index], rule.to, rule.send, " ".join(rule.when.split()))
            for index, rule in enumerate(recipe.routes.get(name, ()))
        )
        for name in recipe.models
    }
    thresholds = {name: recipe.batching.thresholds.get(name, 1) for name in recipe.models}
    policy = recipe.batching.policy or ("fixed" if recipe.batching.thresholds else "auto")
    return RecipeIR(
        name=recipe.name,
        entry=recipe.entry,
        models=models,
        routes=routes,
        batching=BatchingIR(policy, thresholds),
        params=dict(recipe.params),
        source=source,
        description=recipe.description,
    )


def _path(document: Document, name: str, text: str) -> str:
    return model_path(text, document.spot(("models", name, "path")).folders) or text
