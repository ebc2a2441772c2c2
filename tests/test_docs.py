"""Documentation that can be checked is checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tokenflow.dsl.load import load_recipe
from tokenflow.dsl.reference import recipe_reference
from tokenflow.errors import RecipeError

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
ENGINES = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
FAULTS = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", GUIDE + ENGINES + FAULTS, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
ROUTES = {
    "slm": [{"when": "entropy > 0.1", "to": "llm", "send": "drop_last"}],
    "llm": [{"after": 1, "to": "slm", "send": "keep"}],
}


def test_the_reference_of_recipes_is_what_the_schema_says() -> None:
    assert GUIDE.endswith(recipe_reference()), "run: tokenflow schema --markdown"


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_guide_is_a_recipe_or_a_part_of_one(example: str) -> None:
    """What an example leaves out is filled in."""
    part = yaml.safe_load(example)
    draw = part.get("draw", {})
    routes = part.get("routes", {} if draw else ROUTES)
    members = {*draw, *routes, *(rule["to"] for rules in routes.values() for rule in rules)}
    recipe = {
        "name": "example",
        "params": {"tau": 0.03},
        "models": dict.fromkeys(sorted(members), "Qwen/Qwen3-0.6B"),
        **({} if draw else {"entry": "slm", "routes": routes}),
        **part,
    }
    try:
        load_recipe(recipe)
    except RecipeError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize("example", PYTHON)
def test_every_example_in_python_is_a_recipe_file(example: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(example)
    assert load_recipe(file).reachable() == ("slm", "llm")
