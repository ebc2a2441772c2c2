"""A recipe in a few lines of plain text."""

from __future__ import annotations

from tokenflow.dsl.ir import ModelIR, RecipeIR


def describe(recipe: RecipeIR) -> str:
    """Summarise a recipe: members with their codes, rules as written, parameters, thresholds."""
    lines = [f"{recipe.name}: starts at {recipe.entry}"]
    if recipe.description:
        lines.append(" ".join(recipe.description.split()))
    if recipe.params:
        lines.append(
            "params: " + ", ".join(f"{name} = {value:.12g}" for name, value in recipe.params.items())
        )
    lines.append("models:")
    width = max(len(model.name) for model in recipe.models)
    lines += [f"  {model.code} {model.name:{width}}  {_placement(model)}" for model in recipe.models]
    lines.append("routes:")
    for model in recipe.models:
        rules = recipe.routes.get(model.name, ())
        lines += [f"  {model.name:{width}}  if {rule.text}: to {rule.to}, {rule.send}" for rule in rules]
        if not rules:
            lines.append(f"  {model.name:{width}}  stays")
    thresholds = ", ".join(f"{name} {count}" for name, count in recipe.batching.thresholds.items())
    lines.append(f"batching: {recipe.batching.policy}, thresholds {thresholds}")
    return "\n".join(lines)


def _placement(model: ModelIR) -> str:
    config = model.config
    parallel = f" x{config.tensor_parallel}" if config.tensor_parallel > 1 else ""
    return f"{config.path} ({config.engine}{parallel}, {config.dtype}, device {config.device})"
