"""The shape of a recipe file as JSON Schema, for editors that complete and check while one writes."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenflow.dsl.schema import NAME, Recipe
from tokenflow.types import EndpointConfig, ModelConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> str:
    """The schema as JSON text.  It knows keys and types; ``tokenflow check`` knows meanings as well."""
    schema = _tidy(Recipe.model_json_schema())
    for shape, config in (("Model", ModelConfig), ("Endpoint", EndpointConfig)):
        for name, text in _settings(config).items():
            schema["$defs"][shape]["properties"][name]["description"] = text
    # What is not simulated is somewhere.
    schema["$defs"]["Model"]["anyOf"] = [{"required": ["path"]}, {"required": ["engine", "latency_ms"]}]
    models = schema["properties"]["models"]
    models["additionalProperties"] = {
        "anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/Model"}]
    }
    for key in ("models", "heads"):
        schema["properties"][key]["propertyNames"] = {"pattern": NAME}
    return json.dumps({"$schema": DIALECT, "title": "tokenflow recipe", **schema}, indent=2) + "\n"


def _tidy(schema: Any) -> Any:
    """Without titles, which repeat the keys, and without defaults that nobody can write."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _tidy(item) for name, item in value.items()} if key == "properties" else _tidy(value)
        for key, value in schema.items()
        if key != "title" and not (key == "default" and _unwritable(value))
    }


def _unwritable(default: Any) -> bool:
    return isinstance(default, dict | list) or (default in ("", 0, None) and default is not False)


def _settings(config: type) -> dict[str, str]:
    """What each setting means, from where the settings are defined."""
    entries = re.findall(r":param (\w+): (.+?)(?=\n\s*:param|\Z)", config.__doc__ or "", re.DOTALL)
    return {name: " ".join(text.replace("``", "").split()) for name, text in entries}
