"""Command line overrides, ``--set key.path=value``: changes to a recipe before it is checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, get_origin

from tokenflow.dsl.schema import Model
from tokenflow.dsl.source import Document, Spot, read_value
from tokenflow.dsl.validate import shape_at, unknown_key
from tokenflow.dsl.wording import Path, did_you_mean, key_path, printable, show

_STEP = r"(?:[\w-]+(?:\[\d{1,9}\])*)"
_KEY_PATH = re.compile(rf"{_STEP}(?:\.{_STEP})*")


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply ``key.path=value`` overrides in order; problems are reported in the document.

    Values are YAML.  A model path is looked up in the current directory first, then as in the recipe.
    """
    folders = (FilePath.cwd(), *document.spot(()).folders)
    for override in overrides:
        spot = Spot(f"--set {printable(override)}", folders)
        fault = _apply(document, override, spot)
        if fault is not None:
            document.note(spot, *fault)


def _apply(document: Document, override: str, spot: Spot) -> tuple[Path, str] | None:
    """Apply one override, or say at which key path it fails and why."""
    key_text, equals, text = override.partition("=")
    if not equals or not _KEY_PATH.fullmatch(key_text):
        return (), 'expected KEY.PATH=VALUE, as in "params.tau=0.1"'
    path: Path = tuple(
        int(step[1:-1]) if step.startswith("[") else step for step in re.findall(r"\[\d+\]|[\w-]+", key_text)
    )
    value: object = document.data
    for depth, key in enumerate(path):
        if (message := _misstep(document, path[:depth], key, value)) is not None:
            return path[: depth + 1], message
        value = _child(value, key)
    try:
        new = read_value(text)
    except ValueError as error:
        return path, f"cannot read the value {show(text)}: {error}; quote it"
    _make_room(document, path)
    document.put(path, new, spot)
    return None


def _misstep(document: Document, parent: Path, key: str | int, value: object) -> str | None:
    """Why the recipe has no ``key`` below ``parent``, whose value is ``value``; None if it may have one."""
    shape = shape_at(parent)
    named = get_origin(shape) is dict
    if not named and not hasattr(shape, "model_fields") and get_origin(shape) is not list:
        return f"{key_path(parent)} is a single value, without keys"
    if get_origin(shape) is list:
        count = len(value) if isinstance(value, list) else 0
        if not isinstance(key, int):
            return f"{key_path(parent)} is a list: give an index, as in {key_path(parent)}[0]"
        return None if key < count else f"no such rule: {key_path(parent)} has {count}"
    if isinstance(key, int):
        return f"{key_path(parent)} is not a list"
    if value is not None and not isinstance(value, dict) and not (shape is Model and isinstance(value, str)):
        return f"cannot be set: {key_path(parent)} is {show(value)} in the recipe"
    if not named:
        if key in shape.model_fields:
            return None
        is_param = not parent and key in _names(document, "params")
        return f'unknown key (did you mean "params.{key}"?)' if is_param else unknown_key((*parent, key))
    kind = {"params": "param", "heads": "head"}.get(str(parent[-1]), "model")
    known = _names(document, f"{kind}s")
    if key in known:
        return None
    return f"unknown {kind}" + (did_you_mean(key, known) or f" (known: {', '.join(known) or 'none'})")


def _names(document: Document, key: str) -> list[str]:
    names = document.data.get(key)
    return list(names) if isinstance(names, dict) else []


def _child(value: object, key: str | int) -> object:
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if isinstance(value, list) and isinstance(key, int) else None


def _make_room(document: Document, path: Path) -> None:
    """Give the value at ``path`` the mappings around it; a model written as a bare path becomes one."""
    container: Any = document.data
    for depth, key in enumerate(path[:-1], start=1):
        inner = _child(container, key)
        if inner is None:
            container[key] = {}
        elif isinstance(inner, str) and shape_at(path[:depth]) is Model:
            container[key] = {"path": inner}
        container = container[key]
