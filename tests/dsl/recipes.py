"""A recipe that is right, and what is said of it after a change that makes it wrong."""

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


def changed(old: str, new: str) -> str:
    """The recipe with one piece of text replaced."""
    assert PAIR.count(old) == 1, f"{old!r} occurs {PAIR.count(old)} times"
    return PAIR.replace(old, new)


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
