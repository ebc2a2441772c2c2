"""What a request may say, and what it is told where it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenflow.errors import ContextTooLong, InvalidRequest
from tokenflow.prompts import (
    check_endpoints,
    check_known_ids,
    encode,
    is_long,
    param_values,
    sampling_params,
)
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.types import EndpointConfig, SamplingParams

FORMS = "a prompt is a text, a list of token ids or a list of chat messages"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parents[1] / "recipes" / "demo" / "small")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; give at least one character"),
        ([], "the prompt is empty; give at least one token or message"),
        (3, f"{FORMS}, got int"),
        (None, f"{FORMS}, got NoneType"),
        (b"abc", f"{FORMS}, got bytes"),
        ({"role": "user"}, f"{FORMS}, got dict"),
        ([True], f"{FORMS}, got bool at index 0"),
        ([1, "a"], f"{FORMS}, got str at index 1"),
        ([1, 2.0], f"{FORMS}, got float at index 1"),
        ([1, 100], "token id 100 at index 1 is out of range: the tokenizer has 100 ids"),
        ([{"role": "user", "content": "a"}, 3], "message 1 must be a mapping, got int"),
        ([{"content": "a"}], "message 0 needs a 'role'"),
        ([{"role": "user"}], "message 0: content must be a text or text parts, got NoneType"),
        (
            [{"role": "tool", "content": None}],
            "message 0: content must be a text or text parts, got NoneType",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            "message 0: content parts must be {'type': 'text', 'text': ...}",
        ),
        (
            [{"role": "user", "content": ["a"]}],
            "message 0: content parts must be {'type': 'text', 'text': ...}",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "message 0: content parts must be {'type': 'text', 'text': ...}",
        ),
    ],
)
def test_a_wrong_prompt_is_named(tokenizer: Tokenizer, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode(prompt, tokenizer, 100)
    assert str(caught.value) == message
    assert caught.value.param == "prompt"


def test_text_ids_messages_and_parts_of_text_say_the_same(tokenizer: Tokenizer) -> None:
    expected = encode("Q: 93*7=?\nA: ", tokenizer, 100)
    assert expected[0] == tokenizer.bos_id
    assert encode(tuple(expected), tokenizer, 100) == expected
    assert encode([{"role": "user", "content": "93*7=?"}], tokenizer, 100) == expected
    parts = [{"type": "text", "text": "93*"}, {"type": "text", "text": "7=?"}]
    assert encode([{"role": "user", "content": parts}], tokenizer, 100) == expected


def test_an_assistant_may_have_said_nothing(tokenizer: Tokenizer) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    nothing = [said[0], {"role": "assistant", "content": None}]
    assert encode(nothing, tokenizer, 100) == encode(said, tokenizer, 100)


def test_a_text_that_spells_its_beginning_gets_no_second_one(tokenizer: Tokenizer) -> None:
    plain = encode("ab", tokenizer, 100)
    assert plain.count(tokenizer.bos_id or 0) == 1
    assert encode("<bos>ab", tokenizer, 100) == plain
    assert encode("ab", tokenizer, 100, add_special_tokens=False) == plain[1:]
    assert encode("<bos>ab", tokenizer, 100, add_special_tokens=False) == plain


def test_a_text_with_a_token_that_not_all_models_have_is_refused(tokenizer: Tokenizer) -> None:
    last = tokenizer.tokens[99]
    assert last is not None
    assert encode(last, tokenizer, 100)[-1] == 99
    with pytest.raises(InvalidRequest, match="token id 99 at index 1 is out of range"):
        encode(last, tokenizer, 99)


def test_messages_are_written_by_the_owner_of_the_template_with_its_variables(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    ending = tokenizer.encode("A: b ", add_special_tokens=False)
    going_on = {"continue_final_message": True}
    assert encode(messages, tokenizer, 100, template=going_on)[-len(ending) :] == ending
    assert encode(messages, tokenizer, 100)[-len(ending) :] != ending
    with pytest.raises(InvalidRequest, match="choose one of them"):
        encode(messages, tokenizer, 100, template={**going_on, "add_generation_prompt": True})


@pytest.mark.parametrize(
    ("prompt", "long"),
    [
        ("abc", False),
        ("a" * 2001, True),
        ([1] * 5000, False),
        ([], False),
        (7, False),
        ([{"role": "user", "content": "abc"}, {"role": "user"}, 3], False),
        ([{"role": "user", "content": "a" * 1999}, {"role": "user", "content": "ab"}], True),
        ([{"role": "user", "content": [{"type": "text", "text": "ab"}, {"text": 3}, "c"]}], False),
        ([{"role": "user", "content": [{"type": "text", "text": "a" * 2001}]}], True),
        ([{"role": "user", "content": ""}] * 51, True),
    ],
)
def test_whether_a_prompt_is_work_is_known_before_it_is_checked(prompt: Any, long: bool) -> None:
    assert is_long(prompt) == long


def test_a_conversation_without_end_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="can have 4096 messages at most, got 4097"):
        encode([{"role": "user", "content": ""}] * 4097, tokenizer, 1000)


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_listed(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hello"}]
    for prompt in ("hello", chat, [1, 2, 3]):
        count = len(encode(prompt, tokenizer, 1000))
        assert len(encode(prompt, tokenizer, 1000, most=count)) == count
        with pytest.raises(ContextTooLong, match=f"has {count} tokens, but .* holds {count - 1}$"):
            encode(prompt, tokenizer, 1000, most=count - 1)


def test_of_a_text_that_is_far_too_long_the_beginning_is_read(tokenizer: Tokenizer) -> None:
    """It would take seconds and gigabytes."""
    with pytest.raises(ContextTooLong, match=r"has more than 161 tokens, but .* holds 10$"):
        encode("7" * 2**23, tokenizer, 1000, most=10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1}, "unknown sampling setting 'temprature' (did you mean 'temperature'?)"),
        ({"zzz": 1}, "unknown sampling setting 'zzz'"),
        ({"stop": 3}, "stop must be a list, got int"),
        ({"stop_token_ids": 30}, "stop_token_ids must be a list, got int"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens 5 exceeds max_tokens 3"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_params(given)
    assert str(caught.value) == message


def test_what_a_request_leaves_open_is_as_the_recipe_says() -> None:
    params = sampling_params({"temperature": 0.5, "top_p": None}, {"temperature": 0.9, "top_p": 0.8})
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.8, 0)


def test_none_means_absent_and_a_stop_may_be_one_string() -> None:
    params = sampling_params({"temperature": None, "stop": "END", "stop_token_ids": [5]})
    assert params.temperature == 0
    assert params.stop == ("END",)
    assert params.stop_token_ids == (5,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias names token id 100, but the tokenizer has 100 ids"),
        ({"stop_token_ids": [999]}, "stop_token_ids names token id 999, but the tokenizer has 100 ids"),
    ],
)
def test_settings_name_only_ids_of_the_tokenizer(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_known_ids(sampling_params(given), 100)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "params must be a mapping, got list"),
        ({"tua": 1}, "the recipe has no parameter 'tua'; it has: tau"),
        ({"tau": "x"}, "parameter 'tau' must be a finite number, got 'x'"),
        ({"tau": True}, "parameter 'tau' must be a finite number, got True"),
        ({"tau": float("nan")}, "parameter 'tau' must be a finite number, got nan"),
        (
            {"tau": -1e308},
            "parameter 'tau' must be from -3.4e+38 to 3.4e+38, as float32 can hold, got -1e+308",
        ),
        ({"tau": 10**400}, f"parameter 'tau' must be a finite number, got {'1' + '0' * 39}"),
    ],
)
def test_a_wrong_parameter_is_named(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        param_values({"tau": 0.03}, given)
    assert str(caught.value) == message


def test_parameters_come_in_the_order_of_the_recipe_with_its_defaults() -> None:
    assert param_values({"a": 1.0, "b": 2.0}, {"b": 5}) == (1.0, 5.0)
    assert param_values({"a": 1.0}, None) == (1.0,)
    assert param_values({"a": 1.0, "b": 2.0}, {"a": np.float32(0.5), "b": np.int64(5)}) == (0.5, 5.0)


@pytest.mark.parametrize(
    ("asked", "listed", "param"),
    [
        ({"repetition_penalty": 1.2}, 20, "repetition_penalty"),
        ({"temperature": 0.5}, 1, "temperature"),
        ({"logprobs": True}, 0, "logprobs"),
        ({"top_logprobs": 5}, 4, "top_logprobs"),
    ],
)
def test_what_an_endpoint_does_not_list_cannot_be_asked_for(
    asked: dict[str, Any], listed: int, param: str
) -> None:
    endpoints = {"llm": EndpointConfig(base_url="http://x/v1", top_logprobs=listed)}
    with pytest.raises(InvalidRequest, match="model 'llm' runs behind an endpoint") as caught:
        check_endpoints(SamplingParams(**asked), endpoints)
    assert caught.value.param == param
    check_endpoints(SamplingParams(**asked), {})


def test_what_an_endpoint_lists_can_be_asked_for() -> None:
    endpoints = {"llm": EndpointConfig(base_url="http://x/v1", top_logprobs=5)}
    sampling = SamplingParams(temperature=0.7, presence_penalty=1.0, logprobs=True, top_logprobs=5)
    check_endpoints(sampling, endpoints)
    check_endpoints(SamplingParams(), {"llm": EndpointConfig(base_url="http://x/v1", top_logprobs=0)})
