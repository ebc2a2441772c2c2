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
    rules = recipe.routes.get(model.name, ())
    texts = [_numbered(recipe, model, number, rule) for number, rule in enumerate(rules, start=1)]
    width = max(map(len, texts), default=0)
    python = recipe.python.get(model.name)
    if python is not None and python.routes:
        return ["  └─ Python decides: stays, or goes to any model"]
    lines = []
    for rule, text in zip(rules, texts, strict=True):
        line, tip = ("─", "▶") if rule.send == "keep" else ("╌", "▷")
        lines.append(f"  ├{line} {text} {line * (width - len(text) + 2)}{tip} {rule.to}")
    return [*lines, f"  └─ {'otherwise' if rules else 'always'} stays"]


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
