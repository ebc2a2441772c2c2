"""The shape of a recipe: which keys there are, and what type each one has."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tokenflow.dsl.expr import MAX_TEXT
from tokenflow.dsl.ir import HeadDtype, HeadKind, OnFailure, Policy, Send
from tokenflow.dsl.wording import show
from tokenflow.endpoints import parse_url
from tokenflow.types import MAX_PARAM, MAX_TOP_LOGPROBS, EndpointConfig, ModelConfig

EngineName = Literal["torch", "sglang", "openai", "sim"]
MAX_MODELS = 64
MAX_ROLLBACK = 512
NAME_RULE = 'a name of letters, digits, "_" and "-" that begins with a letter'
NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"

_DEFAULT: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(ModelConfig)}
_REMOTE: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(EndpointConfig)}


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


def _as_url(value: str) -> str:
    """A URL that nothing is left out of when it is used."""
    try:
        parse_url(value)
    except ValueError as error:
        raise PydanticCustomError("url", "it {why}", {"why": str(error)}) from None
    return value


def _as_share(value: object) -> object:
    """A share of steps, or the name of the param that says it."""
    if isinstance(value, str) or (_is_number(value) and 0 <= value <= 1):  # type: ignore[operator]
        return float(value) if not isinstance(value, str) else value  # type: ignore[arg-type]
    raise PydanticCustomError("told", "expected a share of steps, from 0 to 1, or the name of a param")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_LONGEST_STEP_MS = 3.6e6


def _auto_as_none(value: object) -> object:
    """A size that is to be chosen."""
    return None if value == "auto" else value


Name = Annotated[str, Field(pattern=NAME)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_PARAM, le=MAX_PARAM)]
Cache = Annotated[
    Count | None, BeforeValidator(_auto_as_none, json_schema_input_type=Count | Literal["auto"] | None)
]
Seconds = Annotated[float, Field(ge=0.001, le=1e6)]
Condition = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | bool)]
Latency = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_as_table, json_schema_input_type=float | dict[int, float]),
]
Share = Annotated[Any, BeforeValidator(_as_share, json_schema_input_type=float | str)]
Weight = Annotated[str, BeforeValidator(_weight_as_text, json_schema_input_type=float | str)]


class Shape(BaseModel):
    """A mapping of named keys.

    A key that may be left out has a default that nobody can write, so that an empty value is an error; only
    where None is a setting of its own may it be written.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Endpoint(Shape):
    """Where a model runs that is reached over HTTP."""

    base_url: Annotated[str, Field(pattern=r"^https?://[^/]+"), AfterValidator(_as_url)]
    model_id: str = _REMOTE["model_id"]
    api_key_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = _REMOTE["api_key_env"]
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = _REMOTE["top_logprobs"]
    span: Count = _REMOTE["span"]
    concurrency: Count = _REMOTE["concurrency"]
    timeout_s: Annotated[float, Field(gt=0, le=86400)] = _REMOTE["timeout_s"]
    retries: Annotated[int, Field(ge=0, le=100)] = _REMOTE["retries"]


class Model(Shape):
    """How one member is loaded and run."""

    path: Text = _DEFAULT["path"]
    engine: EngineName = _DEFAULT["engine"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _DEFAULT["dtype"]
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = _DEFAULT["device"]
    context_length: Count | None = _DEFAULT["context_length"]
    kv_cache: Cache = _DEFAULT["kv_cache"]
    max_requests: Count = _DEFAULT["max_requests"]
    max_batch_tokens: Count = _DEFAULT["max_batch_tokens"]
    prefix_cache: bool = _DEFAULT["prefix_cache"]
    threads: Count = _DEFAULT["threads"]
    tensor_parallel: Count = _DEFAULT["tensor_parallel"]
    verify: bool = _DEFAULT["verify"]
    endpoint: Endpoint | None = _DEFAULT["endpoint"]
    latency_ms: Latency = _DEFAULT["latency_ms"]
    routing: dict[str, Share] = {}
    trace: Text = _DEFAULT["trace"]
    load_timeout: Seconds = _DEFAULT["load_timeout"]
    step_timeout: Seconds = _DEFAULT["step_timeout"]
    restarts: Annotated[int, Field(ge=0, le=2**31 - 1)] = _DEFAULT["restarts"]


class Head(Shape):
    """A learned router head, for head("name") and threshold("name") in the rules of one model."""

    kind: HeadKind
    """Whose network it is: R2R, CITER or Co-LLM."""
    path: Text = ""
    """A checkpoint file or a directory; co_llm needs none, its head is in the model's own checkpoint."""
    threshold: Number | None = None
    """What threshold("name") gives; without it, what is stored in the checkpoint."""
    dtype: HeadDtype = "float32"
    """What it computes in; 16 bits take half the memory and less time, and move its scores a little."""


class Rule(Shape):
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


class Budget(Shape):
    """What a model may write of one response; once it is used up, requests stay away from the model."""

    max_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """At most this share of the output tokens so far."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """At most so many tokens."""


class Sampling(Shape):
    """How tokens are drawn where a request does not say; without it, every response is greedy."""

    max_tokens: Count | None = None
    """Most output tokens; None means as many as the context allows."""
    temperature: Annotated[float, Field(ge=0, le=3.4e38)] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0
    """Keep the k most probable tokens; 0 and -1 keep all."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches top_p."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less probable than min_p times the most probable one."""
    repetition_penalty: Annotated[float, Field(gt=0, le=3.4e38)] = 1.0
    """Above 1 discourages every token that occurs in the prompt or the output."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted once per occurrence in the output."""


class Assume(Shape):
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


class Batching(Shape):
    """How many ready requests a model waits for."""

    policy: Policy | None = None
    """"eager" starts with what is ready, "fixed" waits for the thresholds given, "planned" plans them once
    from what is assumed; "lookahead" and "auto" measure while they serve and plan again: "lookahead" also
    holds a batch back for requests that are about to arrive, "auto" does where that is faster."""
    thresholds: dict[str, Count] = {}
    """Ready requests by model for "fixed"; 1 where nothing is said."""
    assume: Assume = Assume()
    """What is planned with until it is measured."""


class Recipe(Shape):
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
    rollback_to: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)] = ""
    """A text that ends a step: only the last step is tentative, as a whole, until the next one begins."""
    on_failure: OnFailure = "fail"
    """When a model's workers keep dying: "fail" ends every request, "degrade" goes on with the others."""
    sampling: Sampling = Sampling()
    """How tokens are drawn where a request does not say."""
    chat_template: str = ""
    """The model whose chat template writes conversations; without one, the entry's."""
    scorer: str = ""
    """The model that gives prompts their log-probabilities, where a request asks for them (echo)."""
    batching: Batching = Batching()
    """When a model starts a batch."""
