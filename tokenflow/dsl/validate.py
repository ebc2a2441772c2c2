"""Data against the shape of a recipe: what is said where they differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tokenflow.dsl.ir import HeadKind
from tokenflow.dsl.schema import MAX_MODELS, NAME_RULE, Model, Recipe, Shape
from tokenflow.dsl.source import Document, plain_scalar
from tokenflow.dsl.wording import Path, closest, did_you_mean, show


def validate(document: Document) -> Recipe | None:
    """Check the shape of a document; problems are reported there, and None returned if there are any."""
    for name, value in _items(document.data.get("models")):
        if isinstance(value, str):
            document.data["models"][name] = {"path": value}
    try:
        return Recipe.model_validate(document.data)
    except ValidationError as invalid:
        for error in invalid.errors(include_url=False):
            _report(document, error)
        return None


def shape_at(path: Path) -> Any:
    """The type of what stands at ``path``: a model class, ``dict[str, ...]``, ``list[...]`` or a leaf.

    None where the schema has no such place.
    """
    shape: Any = Recipe
    for key in path:
        if isinstance(shape, type) and issubclass(shape, Shape):
            item = shape.model_fields.get(str(key))
            if item is None:
                return None
            shape = _bare(item.annotation)
        elif get_origin(shape) in (dict, list):
            shape = _bare(get_args(shape)[-1])
        else:
            return None
    return shape


def unknown_key(path: Path) -> str:
    """What to say of a key that the schema does not have at ``path``."""
    key, here = str(path[-1]), shape_at(path[:-1])
    known = list(here.model_fields)
    homes: dict[str, str] = {}
    for place, shape in _places(Recipe, ""):
        for name in shape.model_fields:
            homes.setdefault(name, place)
    if key in homes:
        return f"unknown key here: it belongs {homes[key]}"
    near = closest(key, [*known, *homes])
    if near is None:
        return f"unknown key (known keys: {', '.join(known)})"
    return f'unknown key (did you mean "{near}"{"" if near in known else " " + homes[near]}?)'


def _places(shape: Any, path: str) -> Iterator[tuple[str, type[Shape]]]:
    """Every mapping of the schema that has named keys, and where it is."""
    if isinstance(shape, type) and issubclass(shape, Shape):
        yield f"under {path}" if path else "at the top level", shape
        for name, item in shape.model_fields.items():
            yield from _places(_bare(item.annotation), f"{path}.{name}" if path else name)
    elif get_origin(shape) is dict:
        yield from _places(_bare(get_args(shape)[-1]), f"{path}.<{'head' if path == 'heads' else 'model'}>")
    elif get_origin(shape) is list:
        yield from _places(_bare(get_args(shape)[-1]), f"{path}[i]")


def _bare(annotation: Any) -> Any:
    """An annotation without its metadata and without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        rest = [arg for arg in get_args(annotation) if arg is not NoneType]
        return _bare(rest[0]) if len(rest) == 1 else annotation
    return annotation


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _report(document: Document, error: ErrorDetails) -> None:
    path: Path = error["loc"]
    match error["type"]:
        case "missing":
            key = path[-1]
            hint = _HINTS.get(str(key), "")
            document.report(path[:-1], f'missing key "{key}"{hint}', at_key=True)
        case "extra_forbidden":
            document.report(path, unknown_key(path), at_key=True)
        case kind:
            document.report(path, _MESSAGES[kind](path, error))


def _expected(what: str) -> Callable[[Path, ErrorDetails], str]:
    return lambda path, error: f"expected {what}, got {show(error['input'])}{_hint(error)}"


def _expected_text(path: Path, error: ErrorDetails) -> str:
    what = "an expression" if path[-1] == "when" else "a number or an expression"
    return (
        f"expected {what if path[-1] == 'when' or path[0] == 'draw' else 'text'}, got {show(error['input'])}"
    )


def _expected_mapping(path: Path, error: ErrorDetails) -> str:
    shape = shape_at(path)
    if get_origin(shape) is dict:
        return f"expected a mapping of names, got {show(error['input'])}"
    keys = list(shape.model_fields)
    some = ", ".join([*keys[:3], *(["..."] if len(keys) > 3 else [])])
    what = "a path or a mapping" if shape is Model else "a mapping"
    return f"expected {what} with the keys {some}, got {show(error['input'])}"


def _expected_list(path: Path, error: ErrorDetails) -> str:
    hint = ': put "- " before each rule' if isinstance(error["input"], dict) else ""
    return f"expected a list of rules, got {show(error['input'])}{hint}"


def _one_of(path: Path, error: ErrorDetails) -> str:
    options = [str(option) for option in get_args(shape_at(path))]
    got = error["input"]
    hint = did_you_mean(got, options) if isinstance(got, str) else ""
    return f"expected one of {', '.join(options)}, got {show(got)}{hint}"


def _pattern(path: Path, error: ErrorDetails) -> str:
    what = _PATTERNS.get(str(path[-1]), NAME_RULE)
    return f"expected {what}, got {show(error['input'])}"


def _bound(rule: str, key: str, unit: str = "") -> Callable[[Path, ErrorDetails], str]:
    return lambda path, error: f"must be {rule} {error['ctx'][key]:.12g}{unit}, got {show(error['input'])}"


def _hint(error: ErrorDetails) -> str:
    """What was probably meant by a value of the wrong type."""
    got, wanted = error["input"], error["type"]
    if wanted == "bool_type":
        meant = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(str(got).lower())
        return f" (did you mean {meant}?)" if meant else ""
    if not isinstance(got, str) or wanted == "string_unicode":
        return ""
    if re.fullmatch(r"[-+]?[0-9]+,[0-9]+", got):
        return f" (did you mean {got.replace(',', '.')}?)"
    if re.fullmatch(r"[-+]?0[0-9]+", got):
        return " (a leading zero could mean octal: leave it out)"
    return " (leave the quotes out)" if isinstance(plain_scalar(got), int | float) else ""


_HINTS = {
    "send": ' ("keep" commits the sampled token, "drop_last" leaves its position to the next model)',
    "kind": f" ({', '.join(get_args(HeadKind))})",
}
_PATTERNS = {
    "device": "auto, cpu, cuda or cuda:<n>",
    "base_url": "a URL that begins with http:// or https://",
    "api_key_env": "the name of an environment variable",
}
_MESSAGES: dict[str, Callable[[Path, ErrorDetails], str]] = {
    "string_type": _expected_text,
    "string_unicode": _expected("valid Unicode"),
    "int_type": _expected("a whole number"),
    "float_type": _expected("a number"),
    "bool_type": _expected("true or false"),
    "model_type": _expected_mapping,
    "dict_type": _expected_mapping,
    "list_type": _expected_list,
    "literal_error": _one_of,
    "string_pattern_mismatch": _pattern,
    "string_too_short": lambda path, error: "must not be empty",
    "string_too_long": _bound("at most", "max_length", " characters long"),
    "finite_number": _expected("a finite number"),
    "greater_than": _bound("greater than", "gt"),
    "told": lambda path, error: f"{error['msg']}; got {show(error['input'])}",
    "url": lambda path, error: str(error["msg"]),
    "greater_than_equal": _bound("at least", "ge"),
    "less_than_equal": _bound("at most", "le"),
    "too_short": lambda path, error: "at least one model is needed",
    "too_long": lambda path, error: f"at most {MAX_MODELS} models, got {len(error['input'])}",
}
