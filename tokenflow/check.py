"""``tokenflow check``: a recipe, and what can be seen of its models without their weights or the network."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenflow import hub
from tokenflow.delimiters import resolve_texts
from tokenflow.dsl.ir import HeadIR, RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.dsl.meaning import heads_in
from tokenflow.dsl.wording import did_you_mean
from tokenflow.errors import ModelLoadError, Problem, RecipeError
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.text.vocabulary import require_same_vocabulary


def checked(source: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RecipeIR:
    """Load a recipe, and look at those of its models that are in directories here.

    :raises RecipeError: with every problem of the recipe, or else with every problem of the files.
    """
    recipe = load_recipe(source, overrides)
    if problems := [*_file_problems(recipe)]:
        raise RecipeError(problems)
    return recipe


def _file_problems(recipe: RecipeIR) -> Iterator[Problem]:
    """Files that are not there, tokenizers that do not fit, texts that no ids spell, missing thresholds."""
    notes, tokenizers = recipe.notes, {}
    for name in recipe.reachable():
        path = Path(recipe.model(name).config.path)
        if name in recipe.simulated or not path.is_absolute():
            continue
        if (fault := _missing(path)) is not None:
            yield notes.problem(("models", name, "path"), fault)
            continue
        try:
            tokenizers[name] = Tokenizer.load(hub.resolve(str(path)))
        except ModelLoadError as error:
            yield notes.problem(("models", name, "path"), str(error))
    if tokenizers:
        try:
            require_same_vocabulary(tokenizers)
            resolve_texts(recipe, tokenizers.get(recipe.entry) or next(iter(tokenizers.values())))
        except ModelLoadError as error:
            yield notes.problem(("models",), str(error))
        except RecipeError as error:
            yield from error.problems
    for name, head in recipe.heads.items():
        path = Path(head.path)
        if path.is_absolute() and (fault := _missing(path)) is not None:
            yield notes.problem(("heads", name, "path"), fault)
        if name in _thresholds_asked(recipe) and (fault := _threshold_fault(recipe, head)) is not None:
            yield notes.problem(("heads", name), f"{fault}: give one here")


def _missing(path: Path) -> str | None:
    """What to say of a path where there is nothing; None if there is something."""
    try:
        if path.exists():
            return None
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    return f"there is no {path}{did_you_mean(path.name, beside)}"


def _thresholds_asked(recipe: RecipeIR) -> set[str]:
    """Heads whose threshold some rule asks for, where the recipe gives none."""
    trees = [rule.when for rules in recipe.routes.values() for rule in rules]
    trees += [tree for python in recipe.python.values() for tree in python.signals.values()]
    asked = {name for tree in trees for name in heads_in(tree, "threshold")}
    return {name for name in asked if recipe.heads[name].threshold is None}


def _threshold_fault(recipe: RecipeIR, head: HeadIR) -> str | None:
    """What is wrong with the threshold that a head comes with, where that can be seen without torch."""
    config = Path(head.path or recipe.model(head.model).config.path) / "config.json"
    if head.kind != "co_llm" or not config.is_file():
        return None
    try:
        stored = json.loads(config.read_text(encoding="utf-8")).get("defer_threshold")
    except (OSError, ValueError, AttributeError):
        return None  # that is reported with the tokenizer
    if stored is None:
        return "no threshold is stored with the model (defer_threshold of config.json)"
    if isinstance(stored, bool) or not isinstance(stored, int | float) or not math.isfinite(stored):
        return f"defer_threshold of {config} must be a finite number, got {stored!r}"
    return None
