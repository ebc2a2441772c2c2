"""A recipe in a few lines of plain text."""

from __future__ import annotations

from pathlib import PurePath

from tokenflow.dsl.ir import BatchingIR, BudgetIR, HeadIR, ModelIR, PythonIR, RecipeIR
from tokenflow.dsl.tree import write
from tokenflow.types import ModelConfig


def describe(recipe: RecipeIR) -> str:
    """Summarise a recipe: members with their codes, rules as written, parameters, thresholds."""
    simulated = "simulated; " if recipe.simulated else ""
    lines = [f"{recipe.name}: {simulated}{beginning(recipe)}"]
    if recipe.description:
        lines.append(" ".join(recipe.description.split()))
    if recipe.params:
        lines.append(
            "params: " + ", ".join(f"{name} = {value:.12g}" for name, value in recipe.params.items())
        )
    lines.append("models:")
    width = max(len(model.name) for model in recipe.models)
    lines += [f"  {model.code} {model.name:{width}}  {placement(model)}" for model in recipe.models]
    if recipe.heads:
        lines.append("heads:")
        lines += [f"  {head_text(head)}" for head in recipe.heads.values()]
    lines.append("routes:")
    for model in recipe.models:
        python, rules = recipe.python.get(model.name), recipe.routes.get(model.name, ())
        if python is not None:
            lines.append(f"  {model.name:{width}}  {python_text(python)}")
        lines += [f"  {model.name:{width}}  if {rule.text}: to {rule.to}, {rule.send}" for rule in rules]
        if not rules and not (python is not None and python.routes):
            lines.append(f"  {model.name:{width}}  stays")
    if recipe.budgets:
        budgets = (f"{name} {budget_text(budget)}" for name, budget in recipe.budgets.items())
        lines.append(f"budgets: {'; '.join(budgets)}")
    if recipe.rollback:
        verifying = [model.name for model in recipe.models if model.config.verify]
        checked = f", checked by {', '.join(verifying)}" if verifying else ""
        step = f", the last step by {write(recipe.rollback_to)}" if recipe.rollback_to else ""
        lines.append(f"rollback: up to {recipe.rollback} tentative tokens{step}{checked}")
    if recipe.on_failure == "degrade":
        lines.append("on failure: goes on without a model that is given up")
    lines.append(f"batching: {batching_text(recipe.batching)}")
    return "\n".join(lines)


def beginning(recipe: RecipeIR) -> str:
    """Who writes the first token."""
    if not recipe.draw:
        return f"starts at {recipe.entry}"
    weights = ", ".join(f"{name} {write(weight)}" for name, weight in recipe.draw)
    return f"draws who writes each token, by weights {weights}"


def placement(model: ModelIR) -> str:
    """What a model is and how it is run."""
    config = model.config
    if config.engine == "sim":
        return f"simulated: {simulation_text(config)}"
    parallel = f" x{config.tensor_parallel}" if config.tensor_parallel > 1 else ""
    return f"{config.path} ({config.engine}{parallel}, {config.dtype}, device {config.device})"


def simulation_text(config: ModelConfig) -> str:
    """What a simulated model does."""
    steps = ", ".join(
        f"{latency:.12g} ms" + (f" at batch {batch}" if len(config.latency_ms) > 1 else "")
        for batch, latency in config.latency_ms
    )
    shares = [
        f"{share if isinstance(share, str) else f'{100 * share:.12g}%'} of them to {to}"
        for to, share in config.routing.items()
    ]
    return "; ".join(
        [f"a step takes {steps}", *shares, *([f"routes of {config.trace}"] if config.trace else [])]
    )


def batching_text(batching: BatchingIR) -> str:
    """When batches start."""
    if batching.policy != "fixed":
        return batching.policy
    thresholds = ", ".join(f"{name} {count}" for name, count in batching.thresholds.items())
    return f"fixed, thresholds {thresholds}"


def head_text(head: HeadIR) -> str:
    """What a router head is."""
    where = head.path or "in the model's checkpoint"
    threshold = "stored threshold" if head.threshold is None else f"threshold {head.threshold:.12g}"
    dtype = "" if head.dtype == "float32" else f", {head.dtype}"
    return f"{head.name}: {head.kind} for {head.model}, {where}, {threshold}{dtype}"


def budget_text(budget: BudgetIR) -> str:
    """What a budget allows."""
    parts = []
    if budget.max_share is not None:
        parts.append(f"{100 * budget.max_share:.12g}% of the tokens")
    if budget.max_tokens is not None:
        parts.append(f"{budget.max_tokens} tokens")
    return f"at most {' and '.join(parts)}"


def python_text(python: PythonIR) -> str:
    """What is written in Python, and where."""
    roles = {"class": python.router, "route": python.route, "send": python.send, "receive": python.receive}
    named = ", ".join(f"{role} {name}" for role, name in roles.items() if name is not None)
    reads = ", ".join(f"{name} = {write(tree)}" for name, tree in python.signals.items())
    return f"{named} in {PurePath(python.file).name}" + (f"; reads {reads}" if reads else "")
