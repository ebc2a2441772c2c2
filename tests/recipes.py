"""Recipes over toy models, for tests of the runtime."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenflow.dsl.ir import BatchingIR, ModelIR, RecipeIR, RuleIR, Send
from tokenflow.types import ModelConfig

DEMO = Path(__file__).parents[1] / "recipes" / "demo"
ENGINE = f"{Path(__file__).parent / 'toy' / 'engine.py'}:ToyEngine"

ALWAYS = ("boolean", True)


def toy_model(folder: Path, name: str, code: int, **options: Any) -> ModelIR:
    """A member run by the toy engine with ``options``; it has the demo's tokenizer."""
    path = folder / name
    path.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(DEMO / "small" / file, path)
    (path / "toy.json").write_text(json.dumps(options))
    return ModelIR(name, code, ModelConfig(path=str(path), engine=ENGINE))


def recipe_of(
    models: tuple[ModelIR, ...],
    rules: Mapping[str, tuple[tuple[Any, str, Send], ...]],
    thresholds: Mapping[str, int] | None = None,
    params: Mapping[str, float] | None = None,
) -> RecipeIR:
    """A recipe whose rules are given as (condition tree, destination, send)."""
    return RecipeIR(
        name="toy",
        entry=models[0].name,
        models=models,
        routes={
            name: tuple(RuleIR(when, to, send, "...") for when, to, send in some)
            for name, some in rules.items()
        },
        batching=BatchingIR("fixed", thresholds or {}),
        params=params or {},
    )


def toy_pair(
    folder: Path,
    slm: Mapping[str, Any] | None = None,
    llm: Mapping[str, Any] | None = None,
    thresholds: Mapping[str, int] | None = None,
) -> RecipeIR:
    """Two toy models: the small one drops its token where entropy is above 0.4, the large one hands back."""
    uncertain = (">", ("signal", "entropy"), ("number", 0.4))
    certain = ("<=", ("signal", "entropy"), ("number", 0.4))
    return recipe_of(
        (
            toy_model(folder, "slm", 1, salt=1, **(slm or {})),
            toy_model(folder, "llm", 2, salt=2, **(llm or {})),
        ),
        {"slm": ((uncertain, "llm", "drop_last"),), "llm": ((certain, "slm", "keep"),)},
        thresholds,
    )
