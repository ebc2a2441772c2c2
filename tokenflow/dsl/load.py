"""The YAML front end: a recipe file, or the same as data, to the frozen form that is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenflow.dsl import sugar
from tokenflow.dsl.check import check
from tokenflow.dsl.doubts import doubts
from tokenflow.dsl.ir import AssumeIR, BatchingIR, BudgetIR, HeadIR, ModelIR, Notes, RecipeIR
from tokenflow.dsl.meaning import Meaning
from tokenflow.dsl.overrides import apply_overrides
from tokenflow.dsl.paths import head_path, model_path, trace_path
from tokenflow.dsl.recipe import Recipe as PythonRecipe
from tokenflow.dsl.schema import Model, Recipe
from tokenflow.dsl.source import Document, read_file, read_mapping
from tokenflow.dsl.validate import validate
from tokenflow.dsl.wording import Path as DocumentPath
from tokenflow.errors import RecipeError
from tokenflow.types import EndpointConfig, ModelConfig


def load_recipe(
    source: str | os.PathLike[str] | Mapping[str, Any] | PythonRecipe, overrides: Sequence[str] = ()
) -> RecipeIR:
    """Load a recipe and check all of it.

    :param source: a YAML file, a mapping of the same shape, a Python file, or a recipe made in Python.
    :param overrides: changes as ``key.path=value``, applied in order before anything is checked.
    :raises RecipeError: with every problem found.
    """
    if isinstance(source, Mapping):
        return compile_document(read_mapping(source), overrides, "")
    if isinstance(source, PythonRecipe):
        return source.compile(overrides=overrides)
    name = os.fspath(source)
    if name.endswith(".py"):
        from tokenflow.dsl.python import load_python  # which needs compile_document

        return load_python(name, overrides)
    return compile_document(read_file(name), overrides, name)


def compile_document(document: Document, overrides: Sequence[str], source: str) -> RecipeIR:
    """Apply overrides to a recipe as read, check all of it and make its frozen form.

    :raises RecipeError: with every problem found.
    """
    apply_overrides(document, overrides)
    recipe = validate(document)
    meaning = check(document)
    if document.problems:
        raise RecipeError(
            sorted(document.problems, key=lambda problem: (not problem.line, problem.line, problem.column))
        )
    assert recipe is not None
    compiled = _compile(document, recipe, meaning, source)
    return replace(compiled, notes=replace(compiled.notes, warnings=doubts(compiled)))


def _compile(document: Document, recipe: Recipe, meaning: Meaning, source: str) -> RecipeIR:
    def local(find: Callable[[str, Sequence[Path]], str | None], path: DocumentPath, text: str) -> str:
        return (find(text, document.spot(path).folders) or text) if text else ""

    def config(name: str, model: Model) -> ModelConfig:
        path = local(model_path, ("models", name, "path"), model.path)
        trace = local(trace_path, ("models", name, "trace"), model.trace)
        endpoint = None if model.endpoint is None else EndpointConfig(**model.endpoint.model_dump())
        return ModelConfig(**{**model.model_dump(), "path": path, "trace": trace, "endpoint": endpoint})

    models = tuple(
        ModelIR(name, code, config(name, model))
        for code, (name, model) in enumerate(recipe.models.items(), start=1)
    )
    routes = {
        name: tuple(
            sugar.rule(rule, meaning.conditions.get((name, index)))
            for index, rule in enumerate(recipe.routes.get(name, ()))
        )
        for name in recipe.models
    }
    weights = {name: meaning.weights[name] for name in recipe.models if name in meaning.weights}
    if weights:
        routes = sugar.draw_rules(recipe.models, weights)
    routes |= {name: () for name, python in document.python.items() if python.routes}
    heads = {
        name: HeadIR(
            name,
            head.kind,
            local(head_path, ("heads", name, "path"), head.path),
            head.threshold,
            meaning.owners[name],
            head.dtype,
        )
        for name, head in recipe.heads.items()
    }
    thresholds = {name: recipe.batching.thresholds.get(name, 1) for name in recipe.models}
    policy = recipe.batching.policy or ("fixed" if recipe.batching.thresholds else "auto")
    return RecipeIR(
        name=recipe.name,
        entry=recipe.entry or next(iter(weights)),
        models=models,
        routes=routes,
        batching=BatchingIR(policy, thresholds, AssumeIR(**recipe.batching.assume.model_dump())),
        params=dict(recipe.params),
        python=dict(document.python),
        heads=heads,
        draw=tuple(weights.items()),
        budgets={name: BudgetIR(**budget.model_dump()) for name, budget in recipe.budgets.items()},
        rollback=recipe.rollback,
        rollback_to=("at", recipe.rollback_to) if recipe.rollback_to else None,
        on_failure=recipe.on_failure,
        sampling=recipe.sampling.model_dump(exclude_unset=True),
        chat_template=recipe.chat_template,
        scorer=recipe.scorer,
        source=source,
        description=recipe.description,
        notes=Notes(document.spots()),
    )
