"""Recipes that are right, and what is said of them after a change that makes them wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tokenflow.dsl.load import load_recipe
from tokenflow.errors import RecipeError

PAIR = """\
name: pair
entry: slm
params: {tau: 0.03}
models:
  slm: {path: owner/small}
  llm: {path: owner/large, dtype: bfloat16}
routes:
  slm:
    - {when: entropy > tau, to: llm, send: drop_last}
  llm:
    - {when: entropy <= tau, to: slm, send: keep}
batching: {policy: fixed, thresholds: {slm: 1, llm: 2}}
"""

GATED = r"""
name: gated
entry: slm
params: {tau: 0.5}
models: {slm: owner/small, llm: owner/large}
heads:
  gate: {kind: r2r, path: owner/repo/sub/router.pt, threshold: 0.4}
  defer: {kind: co_llm}
routes:
  slm:
    - {when: head("gate") >= threshold("gate"), to: llm, send: drop_last}
  llm:
    - {when: head("defer") < tau, after: 3, at: "\n\n", to: slm, send: keep}
""".strip()
MIXED = """
name: mixed
params: {w: 0.2}
models: {slm: owner/small, mid: owner/middle, llm: owner/large}
draw: {slm: 0.5, mid: 0.3, llm: 0.2}
budgets: {llm: {max_share: 0.25, max_tokens: 100}}
""".strip()
CHECKED = """
name: checked
entry: slm
models:
  slm: owner/small
  llm: {path: owner/large, verify: true}
rollback: 8
routes:
  slm: [{after: 4, to: llm, send: keep}]
  llm: [{after: 1, to: slm, send: keep}]
""".strip()


def changed(old: str, new: str) -> str:
    """The first recipe with one piece of text replaced."""
    return replaced(PAIR, old, new)


def replaced(text: str, old: str, new: str) -> str:
    """A recipe with one piece of text replaced."""
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)


def problems(text: str | bytes, overrides: Sequence[str] = ()) -> list[str]:
    """The lines of a wrong recipe, read from recipe.yaml in the current directory."""
    path = Path("recipe.yaml")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml", overrides)
    lines = [str(problem) for problem in caught.value.problems]
    count = len(lines)
    assert str(caught.value) == "\n".join([*lines, f"{count} problem{'' if count == 1 else 's'}"])
    return lines
