"""The keys of a recipe as a Markdown reference, generated from the schema that checks them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenflow.dsl.expr import FUNCTIONS, SIGNALS
from tokenflow.dsl.json_schema import recipe_schema

_SECTIONS = {
    "Model": "models.<name>",
    "Endpoint": "models.<name>.endpoint",
    "Rule": "routes.<model>[]",
    "Head": "heads.<name>",
    "Budget": "budgets.<model>",
    "Batching": "batching",
    "Assume": "batching.assume",
}


def recipe_reference() -> str:
    """Tables of all keys with their types and defaults, and of what expressions can use."""
    schema = json.loads(recipe_schema())
    parts = [_table("Recipe", schema)]
    parts += [_table(f"`{path}`", schema["$defs"][name]) for name, path in _SECTIONS.items()]
    parts += [_pairs("Signals", "value", SIGNALS), _pairs("Functions", "written", FUNCTIONS)]
    return "\n\n".join(parts) + "\n"


def _table(title: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{key}`{' (required)' if key in required else ''} | {_kind(value)} | {_default(value)} | "
        f"{_inline(value.get('description', ''))} |"
        for key, value in schema["properties"].items()
    ]
    return "\n".join([f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _pairs(title: str, column: str, pairs: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | {_inline(text)} |" for name, text in pairs.items()]
    return "\n".join([f"### {title}", "", f"| name | {column} |", "|---|---|", *rows])


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return "mapping"
    if "anyOf" in schema:
        kinds = [_kind(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    kind: str = {"object": "mapping", "array": "list", "boolean": "true or false"}.get(
        schema["type"], schema["type"]
    )
    low, high = schema.get("minimum"), schema.get("maximum")
    if kind == "integer" and low is not None:
        return f"integer from {low}" if high is None or high > 2**30 else f"integer, {low} to {high}"
    return kind


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return f"`{json.dumps(default)}`" if isinstance(default, str | int | float) else ""


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
