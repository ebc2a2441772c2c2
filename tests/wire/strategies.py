"""Random messages, made from the types of their fields."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from tokenflow.types import ModelConfig, SamplingParams
from tokenflow.wire import messages
from tokenflow.wire.messages import ToRouter, ToWorker

INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | st.text(max_size=8), st.lists, max_leaves=8
)
UNIT = st.floats(0, 1)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**40),
    temperature=st.floats(0, 1e6),
    top_k=st.integers(-1, 2**31),
    top_p=UNIT,
    min_p=UNIT,
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 99),
    repetition_penalty=st.floats(1e-6, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 2**31),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 20),
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    return SIMPLE[kind]


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Messages and parts of messages."""
    hints = typing.get_type_hints(kind, vars(messages))
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


CONFIG = st.builds(
    ModelConfig,
    path=st.text(max_size=9),
    kv_cache=st.none() | st.integers(1, 2**40),
    prefix_cache=st.booleans(),
    threads=st.integers(1, 64),
)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    bytes: st.binary(),
    int: INTEGERS,
    float: FLOATS,
    str: st.text(max_size=9),
    bool: st.booleans(),
    type(None): st.none(),
    Any: PLAIN,
    SamplingParams: SAMPLING,
    ModelConfig: CONFIG,
}
TO_WORKER: st.SearchStrategy[ToWorker] = values(ToWorker)
TO_ROUTER: st.SearchStrategy[ToRouter] = values(ToRouter)
