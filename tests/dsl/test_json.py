"""Recipes as JSON: the compiled form, and the schema by which editors complete and check them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.dsl.recipes import CHECKED, GATED, MIXED, PAIR
from tokenflow.dsl import schema as shapes
from tokenflow.dsl.ir import to_json
from tokenflow.dsl.json_schema import recipe_schema
from tokenflow.dsl.load import load_recipe
from tokenflow.types import ModelConfig

RECIPES = Path(__file__).parents[2] / "recipes"
SCHEMA = RECIPES / "recipe.schema.json"
MODELINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")
SHAPES = [
    shapes.Model,
    shapes.Endpoint,
    shapes.Head,
    shapes.Rule,
    shapes.Budget,
    shapes.Batching,
    shapes.Assume,
]


@pytest.fixture
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(recipe_schema())
    return loaded


@pytest.mark.parametrize("text", [PAIR, GATED, MIXED, CHECKED])
def test_the_compiled_form_is_the_same_json_every_time(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(text)
    written = to_json(load_recipe("recipe.yaml"))
    assert written == to_json(load_recipe("recipe.yaml"))
    loaded = json.loads(written)
    assert json.dumps(loaded, indent=2, sort_keys=True) == written
    assert loaded["source"] == "recipe.yaml"
    assert [model["code"] for model in loaded["models"]] == list(range(1, len(loaded["models"]) + 1))


def test_the_compiled_form_holds_trees_heads_weights_and_budgets(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(GATED)
    gated = json.loads(to_json(load_recipe(file)))
    assert gated["routes"]["slm"] == [
        {
            "when": [">=", ["head", "gate"], ["threshold", "gate"]],
            "to": "llm",
            "send": "drop_last",
            "text": 'head("gate") >= threshold("gate")',
        }
    ]
    assert gated["heads"]["gate"]["model"] == "slm"
    file.write_text(MIXED)
    mixed = json.loads(to_json(load_recipe(file)))
    assert mixed["draw"] == [[name, ["number", x]] for name, x in (("slm", 0.5), ("mid", 0.3), ("llm", 0.2))]
    assert mixed["budgets"] == {"llm": {"max_share": 0.25, "max_tokens": 100}}


def test_the_committed_schema_is_the_one_that_is_generated() -> None:
    assert SCHEMA.read_text() == recipe_schema(), "run: tokenflow schema > recipes/recipe.schema.json"


def test_every_recipe_names_the_schema_on_its_first_line() -> None:
    recipes = list(RECIPES.rglob("*.yaml"))
    assert recipes
    for path in recipes:
        line = MODELINE.match(path.read_text())
        assert line is not None, path
        assert (path.parent / line[1]).resolve() == SCHEMA


def test_the_schema_has_every_key_and_says_what_it_means(schema: dict[str, Any]) -> None:
    places = {shape.__name__: (shape, schema["$defs"][shape.__name__]) for shape in SHAPES}
    for shape, place in [*places.values(), (shapes.Recipe, schema)]:
        assert place["properties"].keys() == shape.model_fields.keys()
        assert place["additionalProperties"] is False
        assert place["description"]
        for key, item in place["properties"].items():
            assert item["description"], key
    assert set(schema["$defs"]) == set(places)


def test_the_schema_describes_models_in_the_words_of_their_settings(schema: dict[str, Any]) -> None:
    properties = schema["$defs"]["Model"]["properties"]
    assert properties["threads"] == {
        "description": "CPU threads of the worker.",
        "type": "integer",
        "minimum": 1,
        "maximum": 2**31 - 1,
        "default": 1,
    }
    assert all(f":param {name}: " in (ModelConfig.__doc__ or "") for name in properties)


def test_the_schema_asks_for_what_must_be_there_and_offers_only_what_may_be_written(
    schema: dict[str, Any],
) -> None:
    assert schema["required"] == ["name", "models"]
    assert schema["$defs"]["Rule"]["required"] == ["to", "send"]
    assert schema["$defs"]["Head"]["required"] == ["kind"]
    assert '"default": ""' not in recipe_schema()
    assert '"default": null' not in recipe_schema()
    assert "default" not in schema["properties"]["rollback"]
    assert schema["$defs"]["Model"]["properties"]["verify"]["default"] is False


def test_the_schema_takes_short_forms(schema: dict[str, Any]) -> None:
    kinds = [
        kind.get("type", kind.get("$ref"))
        for kind in schema["properties"]["models"]["additionalProperties"]["anyOf"]
    ]
    assert kinds == ["string", "#/$defs/Model"]
    weight = schema["properties"]["draw"]["additionalProperties"]
    assert [kind["type"] for kind in weight["anyOf"]] == ["number", "string"]
    assert [kind["type"] for kind in schema["$defs"]["Rule"]["properties"]["when"]["anyOf"]] == [
        "string",
        "boolean",
    ]
