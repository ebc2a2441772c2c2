"""``config.json`` and its like: typed access to their keys, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenflow.errors import ModelLoadError


class Reader:
    """The keys of a configuration file; ``where`` is the file."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is; ``null`` counts as not there."""
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A size or a count; :raises ModelLoadError: if it is none."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(f"{key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; :raises ModelLoadError: if it is none."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.wrong(f"{key} must be a positive number, got {value!r}")
        return float(value)

    def architectures(self) -> list[str]:
        """The names of the model's architecture; :raises ModelLoadError: if they are no list of names."""
        names = self.get("architectures", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.wrong(f"architectures must be a list of names, got {names!r}")
        return names

    def wrong(self, message: str) -> ModelLoadError:
        """The error for a value that makes no sense."""
        return ModelLoadError(f"{self.where}: {message}")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory.

    :raises ModelLoadError: if there is none.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: not found; a model directory in Hugging Face layout has one") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object, got {type(raw).__name__}")
    return raw


def decoder_facts(path: Path) -> Reader:
    """The keys of ``config.json`` that describe the decoder; a model of several parts has them in a part.

    :raises ModelLoadError: if it cannot be read.
    """
    file = path / "config.json"
    raw = read_json(file)
    inner = raw.get("text_config") or {}
    if not isinstance(inner, dict):
        raise Reader(raw, str(file)).wrong(f"text_config must be an object, got {inner!r}")
    return Reader({**raw, **inner}, str(file))
