"""Recipes that are right: the frozen form they become, and its summary."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dsl.recipes import PAIR, changed
from tokenflow.dsl.describe import describe
from tokenflow.dsl.ir import BatchingIR, ModelIR, RecipeIR, RuleIR
from tokenflow.dsl.load import load_recipe
from tokenflow.dsl.schema import Model
from tokenflow.types import ModelConfig

RECIPES = Path(__file__).parents[2] / "recipes"
ENTROPY, TAU = ("signal", "entropy"), ("param", "tau")


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return tmp_path / "recipes" / "recipe.yaml"


def load(path: Path, text: str) -> RecipeIR:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return load_recipe(path)


def test_a_recipe_becomes_one_frozen_form(recipe_file: Path) -> None:
    assert load(recipe_file, PAIR) == RecipeIR(
        name="pair",
        entry="slm",
        models=(
            ModelIR("slm", 1, ModelConfig(path="owner/small")),
            ModelIR("llm", 2, ModelConfig(path="owner/large", dtype="bfloat16")),
        ),
        routes={
            "slm": (RuleIR((">", ENTROPY, TAU), "llm", "drop_last", "entropy > tau"),),
            "llm": (RuleIR(("<=", ENTROPY, TAU), "slm", "keep", "entropy <= tau"),),
        },
        batching=BatchingIR("fixed", {"slm": 1, "llm": 2}),
        params={"tau": 0.03},
        source=str(recipe_file),
        description="",
    )


def test_a_single_model_is_a_recipe(recipe_file: Path) -> None:
    recipe = load(recipe_file, "name: one\nentry: a\nmodels: {a: owner/name}\ndescription: just one\n")
    assert recipe.models == (ModelIR("a", 1, ModelConfig(path="owner/name")),)
    assert recipe.routes == {"a": ()}
    assert recipe.batching == BatchingIR("auto", {"a": 1})
    assert (recipe.params, recipe.description) == ({}, "just one")


def test_a_mapping_is_a_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    rule = {"when": True, "to": "b", "send": "keep"}
    data = {"name": "two", "entry": "a", "models": {"a": "small", "b": "./b"}, "routes": {"a": (rule,)}}
    recipe = load_recipe(data, ["models.b.threads=2"])
    assert [model.config.path for model in recipe.models] == [str(tmp_path / "small"), str(tmp_path / "b")]
    assert recipe.routes["a"] == (RuleIR(("boolean", True), "b", "keep", "true"),)
    assert recipe.model("b").config.threads == 2
    assert recipe.source == ""
    assert data["models"] == {"a": "small", "b": "./b"}


def test_several_rules_keep_their_order_and_text(recipe_file: Path) -> None:
    more = "    - when: >\n        position == 3\n        and true\n      to: llm\n      send: keep\n  llm:"
    recipe = load(recipe_file, changed("  llm:\n    -", f"{more}\n    -"))
    assert [rule.text for rule in recipe.routes["slm"]] == ["entropy > tau", "position == 3 and true"]


@pytest.mark.parametrize(
    ("batching", "policy", "thresholds"),
    [
        ("", "auto", {"slm": 1, "llm": 1}),
        ("batching: {policy: auto}\n", "auto", {"slm": 1, "llm": 1}),
        ("batching: {policy: fixed}\n", "fixed", {"slm": 1, "llm": 1}),
        ("batching: {policy: fixed, thresholds: {llm: 4}}\n", "fixed", {"slm": 1, "llm": 4}),
        ("batching: {thresholds: {llm: 4}}\n", "fixed", {"slm": 1, "llm": 4}),
    ],
)
def test_thresholds_that_are_not_given_are_one(
    recipe_file: Path, batching: str, policy: str, thresholds: dict[str, int]
) -> None:
    recipe = load(recipe_file, PAIR[: PAIR.index("batching:")] + batching)
    assert (recipe.batching.policy, recipe.batching.thresholds) == (policy, thresholds)


def test_local_model_paths_become_absolute_and_hub_ids_stay(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recipe_file.parent
    (folder / "demo/small").mkdir(parents=True)
    (folder / "plain").mkdir()
    monkeypatch.setenv("HOME", "/home/someone")
    expected = {
        "demo/small": str(folder / "demo/small"),
        "plain": str(folder / "plain"),
        "./missing": str(folder / "missing"),
        "../up": str(folder.parent / "up"),
        "/abs/model": "/abs/model",
        "~/model": "/home/someone/model",
        "~": "/home/someone",
        "demo/large": "demo/large",
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
        "gpt2": "gpt2",
    }
    for text, path in expected.items():
        recipe = load(recipe_file, f"name: one\nentry: a\nmodels: {{a: {{path: '{text}'}}}}\n")
        assert recipe.model("a").config.path == path


@pytest.mark.parametrize("text", ["a/b/c", "owner/", "my model", "x" * 300 + "/y/z", "~no-such-user/model"])
def test_a_path_that_is_neither_a_directory_nor_a_hub_id_is_refused(recipe_file: Path, text: str) -> None:
    with pytest.raises(Exception, match="neither a directory nor a hub id"):
        load(recipe_file, f"name: one\nentry: a\nmodels: {{a: {{path: '{text}'}}}}\n")


def test_the_schema_has_the_fields_and_defaults_of_the_model_settings() -> None:
    settings = dataclasses.asdict(ModelConfig())
    assert list(Model.model_fields) == list(settings)
    assert {name: item.default for name, item in Model.model_fields.items()} == settings


def test_every_recipe_of_this_project_loads() -> None:
    for path in RECIPES.rglob("*.yaml"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["demo.yaml", "r_stitch.yaml"])
def test_r_stitch_is_written_as_published(name: str) -> None:
    recipe = load_recipe(RECIPES / name)
    assert (recipe.entry, recipe.params) == ("slm", {"tau": 0.03})
    assert recipe.routes == {
        "slm": (RuleIR((">", ENTROPY, TAU), "llm", "drop_last", "entropy > tau"),),
        "llm": (RuleIR(("<=", ENTROPY, TAU), "slm", "keep", "entropy <= tau"),),
    }


def test_the_summary_names_models_rules_and_thresholds(recipe_file: Path) -> None:
    text = changed("name: pair", "name: pair\ndescription: >\n  two\n  models")
    assert describe(load(recipe_file, text)) == (
        "pair: starts at slm\n"
        "two models\n"
        "params: tau = 0.03\n"
        "models:\n"
        "  1 slm  owner/small (torch, auto, device auto)\n"
        "  2 llm  owner/large (torch, bfloat16, device auto)\n"
        "routes:\n"
        "  slm  if entropy > tau: to llm, drop_last\n"
        "  llm  if entropy <= tau: to slm, keep\n"
        "batching: fixed, thresholds slm 1, llm 2"
    )


def test_the_summary_of_a_single_parallel_model(recipe_file: Path) -> None:
    model = "{path: o/n, engine: sglang, tensor_parallel: 2}"
    recipe = load(recipe_file, f"name: one\nentry: large\nmodels: {{large: {model}}}\n")
    assert describe(recipe) == (
        "one: starts at large\n"
        "models:\n"
        "  1 large  o/n (sglang x2, auto, device auto)\n"
        "routes:\n"
        "  large  stays\n"
        "batching: auto"
    )


def test_loading_a_recipe_imports_no_torch_and_the_frozen_form_no_yaml() -> None:
    code = (
        "import sys, tokenflow.dsl.ir\n"
        "assert not {'yaml', 'pydantic'} & set(sys.modules)\n"
        "import tokenflow.dsl.load, tokenflow.dsl.describe\n"
        "assert not {'torch', 'numpy', 'asyncio'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
