"""Sampling settings are refused with the field's name, or can be sent to a worker and drawn with."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.errors import InvalidRequest
from tokenflow.types import Completion, SamplingParams, Timing, Token, Usage
from tokenflow.wire.channel import decode_to_worker, encode
from tokenflow.wire.messages import Open, Step

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "choice", "min_tokens", "top_logprobs")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True, 10**400, [1]])
def test_a_number_must_be_finite_and_a_number(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be a finite number, got ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, "1", None, True, 2**63, -(2**63) - 1])
def test_an_integer_must_be_one_that_a_message_can_carry(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be a 64-bit integer, got ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_tokens", 0, "a 64-bit integer of at least 1"),
        ("max_tokens", -5, "a 64-bit integer of at least 1"),
        ("max_tokens", 1.5, "a 64-bit integer of at least 1"),
        ("max_tokens", 2**63, "a 64-bit integer of at least 1"),
        ("temperature", -0.1, "at least 0"),
        ("top_k", -2, "at least 1, or 0 or -1 to keep every token"),
        ("top_p", -0.1, "between 0 and 1"),
        ("top_p", 1.1, "between 0 and 1"),
        ("min_p", -0.1, "between 0 and 1"),
        ("min_p", 1.1, "between 0 and 1"),
        ("seed", 2**64, "a 64-bit integer"),
        ("seed", -(2**63) - 1, "a 64-bit integer"),
        ("seed", 1.0, "a 64-bit integer"),
        ("seed", True, "a 64-bit integer"),
        ("choice", -1, "at least 0"),
        ("repetition_penalty", 0, "greater than 0"),
        ("repetition_penalty", -1, "greater than 0"),
        ("presence_penalty", 2.1, "between -2 and 2"),
        ("presence_penalty", -2.1, "between -2 and 2"),
        ("frequency_penalty", 2.1, "between -2 and 2"),
        ("frequency_penalty", -2.1, "between -2 and 2"),
        ("logit_bias", {-1: 1.0}, "a mapping of token ids to finite numbers"),
        ("logit_bias", {"5": 1.0}, "a mapping of token ids to finite numbers"),
        ("logit_bias", {5: math.inf}, "a mapping of token ids to finite numbers"),
        ("logit_bias", {2**63: 1.0}, "a mapping of token ids to finite numbers"),
        ("logit_bias", [5], "a mapping of token ids to finite numbers"),
        ("logit_bias", None, "a mapping of token ids to finite numbers"),
        ("min_tokens", -1, "at least 0"),
        ("stop", "end", "texts of at least one character each, without lone surrogates"),
        ("stop", ("",), "texts of at least one character each, without lone surrogates"),
        ("stop", (5,), "texts of at least one character each, without lone surrogates"),
        ("stop", ("a\ud800",), "texts of at least one character each, without lone surrogates"),
        ("stop", ("\udfff",), "texts of at least one character each, without lone surrogates"),
        ("stop_token_ids", [5], "a tuple of token ids"),
        ("stop_token_ids", (-1,), "a tuple of token ids"),
        ("stop_token_ids", (2**63,), "a tuple of token ids"),
        ("stop_token_ids", (True,), "a tuple of token ids"),
        ("ignore_eos", "no", "true or false"),
        ("ignore_eos", None, "true or false"),
        ("logprobs", 1, "true or false"),
        ("top_logprobs", 21, "between 0 and 20"),
        ("top_logprobs", -1, "between 0 and 20"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object, rule: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be {rule}, got {value!r}"
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("stop", ("a",) * 65, "stop can have 64 entries at most, got 65"),
        ("stop", ("a", "b" * 1001), "stop can have texts of 1000 characters at most, got one of 1001"),
        ("stop_token_ids", (1,) * 1025, "stop_token_ids can have 1024 entries at most, got 1025"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "logit_bias can have 1024 entries at most, got 1025"),
    ],
)
def test_what_costs_something_with_every_token_is_bounded(name: str, value: object, rule: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert (str(caught.value), caught.value.param) == (rule, name)


ANYTHING: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, 2**64, -(2**63), 10**400, math.nan, math.inf, 1e308, 5e-324])
    | st.floats()
    | st.text(st.characters(), max_size=3)
    | st.lists(st.integers() | st.text(st.characters(), max_size=3), max_size=3).map(tuple)
    | st.dictionaries(st.integers() | st.text(max_size=2), st.floats() | st.integers(), max_size=2)
)


@given(name=st.sampled_from(list(SamplingParams.__dataclass_fields__)), value=ANYTHING)
def test_any_value_is_refused_as_the_request_s_own_error_or_reaches_the_worker(
    name: str, value: object
) -> None:
    try:
        sampling = SamplingParams(**{name: value})  # type: ignore[arg-type]
    except InvalidRequest as error:
        assert error.param == name
        return
    step = Step(1, [], [Open(1, 0, 1, 0, sampling, ())], [], [])
    assert decode_to_worker(encode(step)[4:]) == step


def test_a_bias_that_its_owner_changes_later_stays_as_it_was_given() -> None:
    bias = {5: 1}
    sampling = SamplingParams(logit_bias=bias)
    bias[5] = -100
    assert sampling.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    "given",
    [{}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 0}],
)
def test_settings_under_which_only_the_best_token_can_be_drawn_are_greedy(given: dict[str, Any]) -> None:
    assert SamplingParams(**given).greedy


@pytest.mark.parametrize("given", [{}, {"top_k": 2}, {"top_k": 0}, {"top_k": -1}, {"top_p": 0.5}])
def test_settings_under_which_others_can_be_drawn_are_not(given: dict[str, Any]) -> None:
    assert not SamplingParams(temperature=1e-8, **given).greedy


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "stop"])
def test_settings_cannot_be_changed(name: str) -> None:
    sampling = SamplingParams()
    with pytest.raises(AttributeError):
        setattr(sampling, name, operator.attrgetter(name)(sampling))


def test_a_completion_gives_ids_and_the_routing_trace() -> None:
    tokens = (Token(5, "a", "slm"), Token(6, "b", "llm"), Token(2, "", "slm"))
    usage = Usage(3, 3, {"slm": 2, "llm": 1}, handoffs=2, dropped=1)
    completion = Completion("ab", tokens, "stop", usage, Timing(0.1, 0.2), seed=7)
    assert completion.token_ids == [5, 6, 2]
    assert completion.models == ["slm", "llm", "slm"]
