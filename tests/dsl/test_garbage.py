"""Whatever is given as a recipe, the answer is a recipe or a RecipeError that says where."""

# ruff: noqa: E501

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.dsl.recipes import CHECKED, GATED, MIXED, PAIR
from tokenflow.dsl.load import load_recipe
from tokenflow.errors import RecipeError

SNIPPETS = [
    "", " ", "\n", ":", ": ", "-", "- ", "{", "}", "[", "]", ",", "'", '"', "&a ", "*a", "!", "!!int ", "|", ">", "#",
    "? ", "<<", "~", "\t", "%", "@", "\0", "\ud7ff", "\u2028", '"\\ud800"', "9" * 60, "1e400", "-.inf", "0o9", "when",
    "entropy", "path", "models", "slm", "heads", "draw", "at", "after", 'at("', "\\n", "window(", "head('gate')", "rollback",
]  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3),
    st.sampled_from(["slm", "llm", "keep", "entropy > 0.5", "torch", "\ud800"]), st.just(10**400),
)  # fmt: skip
KEYS = [
    "name", "entry", "params", "models", "routes", "batching", "path", "when", "to", "send", "policy", "thresholds",
    "slm", "llm", "engine", "threads", "heads", "kind", "threshold", "draw", "budgets", "max_share", "max_tokens",
    "rollback", "verify", "after", "at", "gate",
]  # fmt: skip
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=4), st.integers())
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


def answer(source: Any, overrides: tuple[str, ...] = ()) -> None:
    try:
        load_recipe(source, overrides)
    except RecipeError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.message
            assert problem.file
            assert (problem.line > 0) == (problem.column > 0)
            assert "\n" not in str(problem)
            assert "pydantic" not in str(problem)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("garbage") / "recipe.yaml"


@settings(max_examples=300, deadline=None)
@given(
    text=st.sampled_from([PAIR, GATED, MIXED, CHECKED]),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9), st.sampled_from(SNIPPETS)), max_size=4),
)
def test_a_recipe_with_random_edits(file: Path, text: str, edits: list[tuple[int, int, str]]) -> None:
    for at, length, snippet in edits:
        text = text[:at] + snippet + text[at + length :]
    file.write_text(text, encoding="utf-8", newline="")
    answer(file)


@settings(max_examples=120, deadline=None)
@given(content=st.binary(max_size=60))
def test_a_file_of_random_bytes(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    answer(file)


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(keys, values, max_size=7))
@example(
    {
        "name": "\ud800",
        "entry": "a\n",
        "models": {"a\n": "\ud800", "b": {"path": 10**400}},
        "params": {"x": 10**400},
    }
)
def test_random_data(data: dict[Any, Any]) -> None:
    answer(data)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), value=values)
@example(seed=1, value=10**400)
def test_a_recipe_with_one_random_value(seed: int, value: Any) -> None:
    source = random.Random(seed)
    data: dict[str, Any] = {
        "name": "pair",
        "entry": "slm",
        "params": {"tau": 0.03},
        "models": {"slm": {"path": "o/s", "dtype": "auto"}, "llm": {"path": "o/l", "verify": True}},
        "heads": {"gate": {"kind": "r2r", "path": "o/r", "threshold": 0.5}},
        "routes": {
            "slm": [{"when": "head('gate') > tau", "after": 2, "at": "x", "to": "llm", "send": "keep"}]
        },
        "budgets": {"llm": {"max_share": 0.5, "max_tokens": 9}},
        "rollback": 4,
        "batching": {"policy": "fixed", "thresholds": {"slm": 1}},
    }
    if source.random() < 0.3:
        for key in ("heads", "routes", "rollback"):
            del data[key]
        data["models"]["llm"]["verify"] = False
        data["draw"] = {"slm": 0.5, "llm": "tau * 2"}
    container: Any = data
    while True:
        key = source.choice(list(container) if isinstance(container, dict) else range(len(container)))
        if not isinstance(container[key], dict | list) or source.random() < 0.3:
            container[key] = value
            break
        container = container[key]
    answer(data)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(
        ["params.tau", "models.slm", "models.slm.path", "routes.slm[0].when", "batching", "name", "entry"]
    ),
    st.one_of(st.text(max_size=12), st.lists(st.sampled_from(SNIPPETS), max_size=5).map("".join)),
)
def test_a_random_override(key: str, text: str) -> None:
    recipe = {
        "name": "pair",
        "entry": "slm",
        "params": {"tau": 0.03},
        "models": {"slm": "o/s", "llm": "o/l"},
        "routes": {"slm": [{"when": "entropy > tau", "to": "llm", "send": "keep"}]},
    }
    answer(recipe, (f"{key}={text}", text))
