"""The shape of a recipe: which keys there are, and what type each one has."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tokenflow.dsl.expr import MAX_TEXT
from tokenflow.dsl.ir import HeadDtype, HeadKind, OnFailure, Policy, Send
from tokenflow.dsl.source import Document, plain_scalar
from tokenflow.dsl.wording import Path, closest, did_you_mean, show
from tokenflow.types import ModelConfig

EngineName = Literal["torch", "sglang", "sim"]
MAX_MODELS = 64
MAX_ROLLBACK = 64
NAME_RULE = 'a name of letters, digits, "_" and "-" that begins with a letter'
NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"

_DEFAULT: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(ModelConfig)}


def _as_text(value: object) -> object:
    """A condition may be the plain word ``true``, and a weight a number; both are read as expressions."""
    return show(value) if isinstance(value, bool | int | float) else value


def _weight_as_text(value: object) -> object:
    return value if isinstance(value, bool) else _as_text(value)


def _as_table(value: object) -> object:
    """A latency may be one number, which holds for all batch sizes, or a table; it becomes sorted pairs."""
    table = {1: value} if _is_number(value) else value
    if not isinstance(table, dict) or not table:
        raise PydanticCustomError(
            "told", "expected milliseconds, or a table of them by batch size, as in {1: 6.0, 16: 7.5}"
        )
    for batch, latency in table.items():
        if not re.fullmatch(r"[1-9][0-9]{0,8}", str(batch)):
            raise PydanticCustomError("told", "batch sizes are whole numbers of at least 1")
        if not _is_number(latency) or not 0 < latency <= _LONGEST_STEP_MS:
            raise PydanticCustomError("told", "a step takes more than 0 ms and at most an hour")
    return tuple(sorted((int(batch), float(latency)) for batch, latency in table.items()))


def _as_share(value: object) -> object:
    """A share of steps, or the name of the param that says it."""
    if isinstance(value, str) or (_is_number(value) and 0 <= value <= 1):  # type: ignore[operator]
        return float(value) if not isinstance(value, str) else value  # type: ignore[arg-type]
    raise PydanticCustomError("told", "expected a share of steps, from 0 to 1, or the name of a param")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_LONGEST_STEP_MS = 3.6e6

Name = Annotated[str, Field(pattern=NAME)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-3.4e38, le=3.4e38)]
Seconds = Annotated[float, Field(ge=0.001, le=1e6)]
Condition = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | bool)]
Latency = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_as_table, json_schema_input_type=float | dict[int, float]),
]
Share = Annotated[Any, BeforeValidator(_as_share, json_schema_input_type=float | str)]
Weight = Annotated[str, BeforeValidator(_weight_as_text, json_schema_input_type=float | str)]


class _Shape(BaseModel):
    """A mapping of named keys.

    A key that may be left out has a default that nobody can write, so that an empty value is an error; only
    where None is a setting of its own may it be written.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Model(_Shape):
    """How one member is loaded and run."""

    path: Text = _DEFAULT["path"]
    engine: EngineName = _DEFAULT["engine"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _DEFAULT["dtype"]
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = _DEFAULT["device"]
    context_length: Count | None = _DEFAULT["context_length"]
    kv_cache: Count | None = _DEFAULT["kv_cache"]
    max_requests: Count = _DEFAULT["max_requests"]
    max_batch_tokens: Count = _DEFAULT["max_batch_tokens"]
    prefix_cache: bool = _DEFAULT["prefix_cache"]
    threads: Count = _DEFAULT["threads"]
    tensor_parallel: Count = _DEFAULT["tensor_parallel"]
    verify: bool = _DEFAULT["verify"]
    latency_ms: Latency = _DEFAULT["latency_ms"]
    routing: dict[str, Share] = {}
    trace: Text = _DEFAULT["trace"]
    load_timeout: Seconds = _DEFAULT["load_timeout"]
    step_timeout: Seconds = _DEFAULT["step_timeout"]
    restarts: Annotated[int, Field(ge=0, le=2**31 - 1)] = _DEFAULT["restarts"]


class Head(_Shape):
    """A learned router head, for head("name") and threshold("name") in the rules of one model."""

    kind: HeadKind
    """Whose network it is: R2R, CITER or Co-LLM."""
    path: Text = ""
    """A checkpoint file or a directory; co_llm needs none, its head is in the model's own checkpoint."""
    threshold: Number | None = None
    """What threshold("name") gives; without it, what is stored in the checkpoint."""
    dtype: HeadDtype = "float32"
    """What it computes in; 16 bits take half the memory and less time, and move its scores a little."""


class Rule(_Shape):
    """When to hand a request over, to whom, and with which tokens; all conditions given must hold."""

    when: Condition = ""
    """An expression over signals, params and heads that is true or false."""
    after: Count = 0
    """This model has written so many tokens since the request came to it."""
    at: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)] = ""
    """The output has just reached this text: a delimiter, a tag."""
    to: str
    """The model that goes on."""
    send: Send
    """"keep" commits the sampled token, "drop_last" leaves its position to the next model."""


class Budget(_Shape):
    """What a model may write of one response; once it is used up, requests stay away from the model."""

    max_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """At most this share of the output tokens so far."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """At most so many tokens."""


class Assume(_Shape):
    """What batches are planned with where nothing is measured; ``tokenflow plan --measure`` prints it.

    A model that is simulated is planned with what it simulates, unless this says something else.
    """

    latency_ms: dict[str, Latency] = {}
    """How long a step takes by model: milliseconds, or a table of them by batch size."""
    routing: dict[str, dict[str, Share]] = {}
    """By model: the share of its steps after which a request goes to each other model."""
    commits: dict[str, dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]] = {}
    """By model and destination: output tokens of such a step; without it, 1, and 0 where the rule that leads
    there drops the token."""


class Batching(_Shape):
    """How many ready requests a model waits for."""

    policy: Policy | None = None
    """"eager" starts with what is ready, "fixed" waits for the thresholds given, "planned" plans them once
    from what is assumed; "lookahead" and "auto" measure while they serve and plan again: "lookahead" also
    holds a batch back for requests that are about to arrive, "auto" does where that is faster."""
    thresholds: dict[str, Count] = {}
    """Ready requests by model for "fixed"; 1 where nothing is said."""
    assume: Assume = Assume()
    """What is planned with until it is measured."""


class Recipe(_Shape):
    """A recipe: how one request flows between models."""

    name: Name
    """What the recipe is called."""
    description: str = ""
    """What it does, in a sentence."""
    entry: str = ""
    """The model that reads the prompt and starts every response; may be left out with draw."""
    params: dict[str, Number] = {}
    """Numbers for expressions, with their defaults; a request may give its own."""
    models: Annotated[dict[str, Model], Field(min_length=1, max_length=MAX_MODELS)]
    """The models by name: a path each (a directory or a hub id), or a mapping."""
    heads: dict[str, Head] = {}
    """Learned router heads by name."""
    routes: dict[str, list[Rule]] = {}
    """Rules by the model that they stand under; the first that fires decides, and without one the request
    stays."""
    draw: dict[str, Weight] = {}
    """Ensembles: the weight of each model, a number or arithmetic over params; every token's writer is drawn
    by them."""
    budgets: dict[str, Budget] = {}
    """What models may write at most of one response."""
    rollback: Annotated[int, Field(ge=1, le=MAX_ROLLBACK)] = 0
    """How many of the last tokens may be tentative, until a model with verify has checked them."""
    on_failure: OnFailure = "fail"
    """When a model's workers keep dying: "fail" ends every request, "degrade" goes on with the others."""
    batching: Batching = Batching()
    """When a model starts a batch."""


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
        if isinstance(shape, type) and issubclass(shape, _Shape):
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


def _places(shape: Any, path: str) -> Iterator[tuple[str, type[_Shape]]]:
    """Every mapping of the schema that has named keys, and where it is."""
    if isinstance(shape, type) and issubclass(shape, _Shape):
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
    what = "auto, cpu, cuda or cuda:<n>" if path[-1] == "device" else NAME_RULE
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
    "told": lambda path, error: f"{error['msg']}; got {show(error['input'])}",
    "greater_than_equal": _bound("at least", "ge"),
    "less_than_equal": _bound("at most", "le"),
    "too_short": lambda path, error: "at least one model is needed",
    "too_long": lambda path, error: f"at most {MAX_MODELS} models, got {len(error['input'])}",
}
