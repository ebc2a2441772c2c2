"""A recipe as a drawing: its models, the rules between them, and what a hand-off sends."""

from __future__ import annotations

from tokenflow.dsl.describe import beginning, budget_text, head_text, placement, python_text
from tokenflow.dsl.ir import ModelIR, RecipeIR, RuleIR

_NARROWEST = 36
_KEPT = "──▶ the sampled token is kept, and sent along"
_DROPPED = "╌╌▷ the sampled token is dropped: the next model writes its position"


def picture(recipe: RecipeIR) -> str:
    """A drawing for a terminal: a box per model, below it an arrow per rule in the order they are tried."""
    lines = [f"{recipe.name}: {beginning(recipe)}"]
    for model in recipe.models:
        lines += [*_box(recipe, model), *_arrows(recipe, model), ""]
    sends = {rule.send for rules in recipe.routes.values() for rule in rules}
    legend = {"keep": _KEPT, "drop_last": _DROPPED}
    return "\n".join([*lines, *(text for send, text in legend.items() if send in sends)]).rstrip()


def mermaid(recipe: RecipeIR) -> str:
    """A Mermaid flowchart, as Markdown viewers draw it: dotted arrows drop the sampled token."""
    lines = ["flowchart LR", "  prompt([prompt])"]
    for model in recipe.models:
        text = "<br/>".join(map(_escaped, [f"{model.code} {model.name}", *_facts(recipe, model)]))
        lines.append(f'  m{model.code}["{text}"]')
    first = [name for name, _ in recipe.draw] or [recipe.entry]
    lines += [f"  prompt --> m{recipe.model(name).code}" for name in first]
    for model in recipe.models:
        for number, rule in enumerate(recipe.routes.get(model.name, ()), start=1):
            arrow = "-->" if rule.send == "keep" else "-.->"
            label = f"{_escaped(_numbered(recipe, model, number, rule))}<br/>{rule.send}"
            lines.append(f'  m{model.code} {arrow}|"{label}"| m{recipe.model(rule.to).code}')
        if text := _when_full(recipe, model):
            lines.append(f'  m{model.code} -->|"{text}<br/>keep"| m{recipe.model(recipe.verifier).code}')
    return "\n".join(lines)


def _box(recipe: RecipeIR, model: ModelIR) -> list[str]:
    facts = _facts(recipe, model)
    width = max(_NARROWEST, len(model.name) + 8, *(len(fact) + 2 for fact in facts))
    entry = model.name in (dict(recipe.draw) or [recipe.entry])
    title = f"─{'▼' if entry else '─'}─ {model.code} {model.name} "
    above = ["  ┊" if recipe.draw else "  │"] if entry else []
    body = [f"│ {fact:{width - 2}} │" for fact in facts]
    return [*above, f"┌{title:─<{width}}┐", *body, f"└─┬{'─' * (width - 2)}┘"]


def _arrows(recipe: RecipeIR, model: ModelIR) -> list[str]:
    leads = [
        (_numbered(recipe, model, number, rule), rule.send, rule.to)
        for number, rule in enumerate(recipe.routes.get(model.name, ()), start=1)
    ]
    if text := _when_full(recipe, model):
        leads.append((text, "keep", recipe.verifier))
    width = max((len(text) for text, _, _ in leads), default=0)
    lines = []
    for text, send, to in leads:
        line, tip = ("─", "▶") if send == "keep" else ("╌", "▷")
        lines.append(f"  ├{line} {text} {line * (width - len(text) + 2)}{tip} {to}")
    python = recipe.python.get(model.name)
    if python is not None and python.routes:
        return [*lines, "  └─ Python decides: stays, or goes to any model"]
    return [*lines, f"  └─ {'otherwise' if leads else 'always'} stays"]


def _when_full(recipe: RecipeIR, model: ModelIR) -> str:
    """When a model hands over to the one that checks whatever its rules say; empty if it never has to."""
    if recipe.verifier in ("", model.name):
        return ""
    return f"{recipe.rollback} tentative tokens" + (" or the end of a step" if recipe.rollback_to else "")


def _facts(recipe: RecipeIR, model: ModelIR) -> list[str]:
    """What there is to say of a model beside its name."""
    facts = [placement(model)]
    facts += [f"head {head_text(head)}" for head in recipe.heads.values() if head.model == model.name]
    if (python := recipe.python.get(model.name)) is not None:
        facts.append(python_text(python))
    if (budget := recipe.budgets.get(model.name)) is not None:
        facts.append(f"budget: {budget_text(budget)}")
    if model.config.verify:
        facts.append(f"checks up to {recipe.rollback} tentative tokens")
    return facts


def _numbered(recipe: RecipeIR, model: ModelIR, number: int, rule: RuleIR) -> str:
    """A rule's text, with its place in the order where there are several."""
    several = len(recipe.routes[model.name]) > 1
    return f"{number}. {rule.text}" if several else rule.text


def _escaped(text: str) -> str:
    """Text inside a quoted Mermaid label, which reads HTML and its own entity codes."""
    return "".join(char if char.isalnum() or char in " ._-=:,/()" else f"#{ord(char)};" for char in text)
