"""Completions over HTTP: what may be asked, and what the router says, in OpenAI's words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served
from tokenflow.server.logprobs import Offsets, text_logprobs

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50, 60]
TEXT = "Q: 93*7=?"


async def test_an_answer_has_what_openais_has_and_says_who_wrote_it(pair: Served) -> None:
    answer = await pair.complete(PROMPT, max_tokens=30)
    direct = await pair.service.router.generate(PROMPT, max_tokens=30)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "toy"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "text": direct.text,
            "logprobs": None,
            "finish_reason": direct.finish_reason,
            "stop_reason": None,
        }
    ]
    usage = direct.usage
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": 4 + usage.completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": usage.dropped,
        },
    }
    ours = answer["tokenflow"]
    assert ours["tokens"] == usage.by_model
    assert (ours["handoffs"], ours["dropped"]) == (usage.handoffs, usage.dropped)
    assert usage.handoffs and usage.dropped, "the test does not test"


@pytest.mark.parametrize("prompt", [TEXT, [TEXT], PROMPT, [PROMPT]])
async def test_a_prompt_is_a_text_or_ids_or_a_list_of_them(pair: Served, prompt: Any) -> None:
    (choice,) = (await pair.complete(prompt, max_tokens=12))["choices"]
    plain = prompt[0] if prompt in ([TEXT], [PROMPT]) else prompt
    assert choice["text"] == (await pair.service.router.generate(plain, max_tokens=12)).text


async def test_several_prompts_get_n_choices_each_in_their_order(pair: Served) -> None:
    prompts = [TEXT, "ab", "x"]
    settings = {"max_tokens": 8, "temperature": 1.0, "seed": 5}
    answer = await pair.complete(prompts, n=2, **settings)
    expected = [
        (await pair.service.router.generate(prompt, choice=choice, **settings)).text
        for prompt in prompts
        for choice in (0, 1)
    ]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert len(set(expected)) > 3
    assert answer["usage"]["prompt_tokens"] == sum(len(p) + 1 for p in prompts)
    assert len(answer["tokenflow"]["seeds"]) == 6


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 3},
        {"logprobs": 2, "echo": True},
        {"stop": ["5", "7"], "return_models": True, "return_token_ids": True},
    ],
)
async def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(
    pair: Served, settings: dict[str, Any]
) -> None:
    settings = {"max_tokens": 25, **settings}
    whole = await pair.complete(PROMPT, **settings)
    *events, last = await pair.complete(
        PROMPT, stream=True, stream_options={"include_usage": True}, **settings
    )
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["tokenflow"]["tokens"] == whole["tokenflow"]["tokens"]
    assert not any("usage" in event for event in events)
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [
            choice["finish_reason"]
        ]
        if choice["logprobs"] is not None:
            for key, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][key]] == values
        for key in ("token_ids", "prompt_token_ids"):
            assert [token for part in parts for token in part.get(key, ())] == choice.get(key, [])
        assert [m for part in parts for m in part.get("tokenflow", {}).get("models", ())] == choice.get(
            "tokenflow", {}
        ).get("models", [])


async def test_choices_of_one_seed_differ_and_can_be_had_again(pair: Served) -> None:
    async def texts(**more: Any) -> list[str]:
        settings = {"max_tokens": 12, "min_tokens": 12, "temperature": 1.5, **more}
        answer = await pair.complete(PROMPT, **settings)
        said = [""] * more["n"]
        for event in answer if more.get("stream") else [answer]:
            for choice in event["choices"]:
                said[choice["index"]] += choice["text"]
        return said

    three = await texts(n=3, seed=7)
    assert len(set(three)) == 3
    assert await texts(n=3, seed=7) == await texts(n=3, seed=7, stream=True) == three
    assert await texts(n=2, seed=7) == three[:2]
    settings = {"max_tokens": 12, "min_tokens": 12, "temperature": 1.5}
    drawn = await pair.complete([PROMPT, PROMPT], n=2, **settings)
    said = [choice["text"] for choice in drawn["choices"]]
    first, again, second, _ = drawn["tokenflow"]["seeds"]
    assert first == again != second
    assert max(first, second) < 2**53, "a client that has floats only cannot give it back"
    assert len(set(said)) == 4
    assert await texts(n=2, seed=first) == said[:2]
    assert await texts(n=2, seed=second) == said[2:]


async def test_a_number_is_an_integer_if_its_value_is_one(pair: Served) -> None:
    written = b'{"prompt": [1.0, 4e1, 50, 60], "max_tokens": 5.0, "n": 2.0, "logit_bias": {"40": 1}}'
    reply = await pair.post("/v1/completions", written)
    plain = await pair.complete(PROMPT, max_tokens=5, n=2, logit_bias={"40": 1.0})
    assert [choice["text"] for choice in reply.json["choices"]] == [
        choice["text"] for choice in plain["choices"]
    ]


async def test_a_stream_has_an_event_for_each_token_and_no_more(pair: Served) -> None:
    events = await pair.complete(PROMPT, max_tokens=20, stream=True)
    whole = await pair.complete(PROMPT, max_tokens=20)
    assert len(events) == whole["usage"]["completion_tokens"]
    assert all(set(event) == {"id", "created", "model", "choices", "object"} for event in events)


async def test_logprobs_hold_each_token_with_its_own_number_among_the_best(pair: Served) -> None:
    (choice,) = (await pair.complete(PROMPT, max_tokens=20, logprobs=2, temperature=1.5, seed=1))["choices"]
    direct = await pair.service.router.generate(
        PROMPT, max_tokens=20, logprobs=True, top_logprobs=2, temperature=1.5, seed=1
    )
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [token.logprob for token in direct.tokens]
    assert logprobs["models"] == direct.models
    for token, name, value, top in zip(
        direct.tokens, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[name] == value
        assert len(top) == 2 + (token.id not in [best.id for best in token.top_logprobs])
    special = pair.service.router.tokenizer.special_ids
    for token, offset, name in zip(direct.tokens, logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith("" if token.id in special else name)


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_are_those_of_text_that_was_held_back_for_a_stop_string(
    pair: Served, stream: bool
) -> None:
    """A token that shows that no stop string comes brings the text of those before it; each has its place."""
    plain = await pair.service.router.generate(PROMPT, max_tokens=12, ignore_eos=True)
    held = "".join(token.text for token in plain.tokens[2:6])
    settings = {
        "max_tokens": 12,
        "ignore_eos": True,
        "logprobs": 0,
        "stop": f"{held[:-1]}\0",
        "stream": stream,
    }
    answer = await pair.complete(PROMPT, **settings)
    choices = [event["choices"][0] for event in answer] if stream else answer["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text == plain.text
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [sum(len(token.text) for token in plain.tokens[:index]) for index in range(12)]
    # Held back to the end, and never followed by the rest of the stop string; and one that does end it.
    for stop, shown in ((plain.text + "\0", plain.text), (held, plain.text.partition(held)[0])):
        answer = await pair.complete(PROMPT, **{**settings, "stop": stop})
        choices = [event["choices"][0] for event in answer] if stream else answer["choices"]
        assert "".join(choice["text"] for choice in choices) == shown
        found = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert found == offsets[: len(found)]


async def test_the_end_of_a_response_has_an_entry_and_no_text(pair: Served) -> None:
    """A stop token is among the tokens: whoever adds up log-probabilities needs it."""
    plain = await pair.service.router.generate(PROMPT, max_tokens=9)
    stop = plain.token_ids[4]
    first = plain.token_ids.index(stop)
    answer = await pair.complete(
        PROMPT, max_tokens=9, logprobs=0, stop_token_ids=[stop], return_token_ids=True
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == plain.token_ids[: first + 1]
    assert len(choice["logprobs"]["tokens"]) == first + 1
    assert len(choice["text"]) < len("".join(choice["logprobs"]["tokens"]))
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * (first + 1)


async def test_prompts_that_are_only_scored_are_counted(pair: Served) -> None:
    async def counted() -> list[float]:
        done = await pair.metric("request_success_total", finished_reason="length")
        return [done, await pair.metric("prompt_tokens_total")]

    before = await counted()
    await pair.complete([PROMPT, PROMPT], max_tokens=0, logprobs=1, echo=True)
    assert [after - b for after, b in zip(await counted(), before, strict=True)] == [2, 2 * len(PROMPT)]


async def test_choices_and_generate_say_what_ended_them(pair: Served) -> None:
    plain = await pair.service.router.generate(PROMPT, max_tokens=9, ignore_eos=True)
    stop, token = next(t.text for t in plain.tokens[1:] if t.text.strip()), plain.token_ids[4]
    base = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True}
    for keys, reason in (({"stop": stop}, stop), ({"stop_token_ids": [token]}, token), ({}, None)):
        (choice,) = (await pair.complete(**base, **keys))["choices"]
        assert choice["finish_reason"] == ("length" if reason is None else "stop")
        assert (choice["stop_reason"], "stop_reason" in choice) == (reason, True)
        events = (await pair.post("/v1/completions", {**base, **keys, "stream": True})).events
        assert events[-1]["choices"][0]["stop_reason"] == reason
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
        settings = {"max_new_tokens": 9, "ignore_eos": True, **keys}
        native = (await pair.post("/generate", {"input_ids": PROMPT, "sampling_params": settings})).json
        assert native["meta_info"]["finish_reason"].get("matched") == reason
    (choice,) = (await pair.complete(**base, stop=stop, min_tokens=9))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (plain.text, "length")


async def test_an_echo_begins_with_the_prompt_and_its_scores(pair: Served) -> None:
    answer = await pair.complete(TEXT, max_tokens=1, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    scored = await pair.service.router.score(TEXT, top=1)
    direct = await pair.service.router.generate(TEXT, max_tokens=1, logprobs=True, top_logprobs=1)
    speller = pair.service.speller()
    expected = text_logprobs((*scored, *direct.tokens), speller, Offsets(speller))
    assert choice["text"] == TEXT + direct.text
    assert choice["logprobs"] == expected
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"] + 1


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [("図a🙂🙂 b", [0, 0, 1, 2, 3, 4, 5]), ("<bos>ab", [0, 5, 6]), ("a<eos>e", [0, 0, 1, 6])],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_of_an_echo_are_places_in_the_text_that_the_client_sent(
    pair: Served, prompt: str, starts: list[int], stream: bool
) -> None:
    """Also of characters that the tokenizer lacks, and of special tokens, which have no text of their own."""
    settings = {"max_tokens": 3, "min_tokens": 3, "logprobs": 0, "echo": True, "stream": stream}
    answer = await pair.complete(prompt, **settings)
    choices = [event["choices"][0] for event in answer] if stream else answer["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text.startswith(prompt)
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    names = [name for choice in choices for name in choice["logprobs"]["tokens"]]
    assert offsets[:-3] == starts
    assert offsets[-3] == len(prompt)
    for name, offset in zip(names[-3:], offsets[-3:], strict=True):
        assert name in pair.service.router.tokenizer.special_tokens.values() or text[offset:].startswith(name)


async def test_an_echo_of_ids_is_their_text_and_may_be_all_there_is(pair: Served) -> None:
    whole = await pair.complete(PROMPT, max_tokens=0, echo=True, logprobs=0, n=2)
    text = pair.service.router.tokenizer.decode(PROMPT)
    assert [choice["text"] for choice in whole["choices"]] == [text, text]
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == len(PROMPT)
    assert whole["usage"]["completion_tokens"] == 0
    (event,) = await pair.complete(PROMPT, max_tokens=0, echo=True, logprobs=0, n=2, stream=True)
    assert event["choices"] == whole["choices"]
    plain = await pair.complete(PROMPT, max_tokens=3, echo=True)
    assert plain["choices"][0]["text"].startswith(text)
    assert plain["choices"][0]["logprobs"] is None


async def test_a_member_of_the_recipe_answers_and_scores_alone(pair: Served) -> None:
    for member in ("slm", "llm"):
        answer = await pair.complete(PROMPT, model=f"toy/{member}", max_tokens=15, logprobs=1, echo=True)
        direct = await pair.service.router.generate(PROMPT, member=member, max_tokens=15)
        assert answer["model"] == f"toy/{member}"
        assert answer["choices"][0]["text"].endswith(direct.text)
        assert set(answer["choices"][0]["logprobs"]["models"]) == {member}
        assert answer["tokenflow"]["tokens"][member] == answer["usage"]["completion_tokens"]


async def test_a_completion_has_16_tokens_unless_it_says_otherwise_or_has_no_room(pair: Served) -> None:
    assert (await pair.complete(PROMPT, ignore_eos=True))["usage"]["completion_tokens"] == 16
    long = await pair.complete([5] * 1020, ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 4


async def test_null_is_absent_and_unknown_keys_are_ignored(pair: Served) -> None:
    plain = await pair.complete(PROMPT, max_tokens=10)
    nothing = dict.fromkeys(
        "logprobs seed n stop temperature top_p suffix best_of echo stream stream_options logit_bias tools "
        "response_format guided_json prompt_logprobs user params model request_id".split()
    )
    unknown = {"metadata": {"a": 1}, "store": True, "service_tier": "auto", "zzz": [1, {"b": None}]}
    neutral = {
        "best_of": 1,
        "n": 1,
        "suffix": "",
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "top_k": -1,
    }
    for more in (nothing, unknown, neutral):
        answer = await pair.complete(PROMPT, **{"max_tokens": 10, **more})
        assert answer["choices"] == plain["choices"]


async def test_tokens_can_be_written_as_their_ids(pair: Served) -> None:
    answer = await pair.complete(PROMPT, max_tokens=5, logprobs=1, return_tokens_as_token_ids=True)
    direct = await pair.service.router.generate(PROMPT, max_tokens=5)
    assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in direct.token_ids]


async def test_the_recipes_parameters_and_settings_of_vllm_reach_the_router(pair: Served) -> None:
    settings: dict[str, Any] = {
        "max_tokens": 30,
        "temperature": 0.8,
        "top_k": 20,
        "min_p": 0.01,
        "seed": 11,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 10,
        "stop": "Q",
        "ignore_eos": True,
        "params": {"tau": 0.1},
    }
    answer = await pair.complete(PROMPT, logit_bias={"41": 2.5}, **settings)
    direct = await pair.service.router.generate(PROMPT, logit_bias={41: 2.5}, **settings)
    assert answer["choices"][0]["text"] == direct.text
    plain = await pair.service.router.generate(PROMPT, max_tokens=30)
    assert direct.text != plain.text


async def test_special_tokens_show_where_they_are_asked_for(pair: Served) -> None:
    bias = {"logit_bias": {"3": 100}, "max_tokens": 3}
    assert (await pair.complete(PROMPT, **bias))["choices"][0]["text"] == ""
    shown = await pair.complete(PROMPT, skip_special_tokens=False, **bias)
    assert shown["choices"][0]["text"] == "<unk>" * 3


async def test_a_text_gets_no_beginning_where_it_shall_not(pair: Served) -> None:
    assert (await pair.complete(TEXT))["usage"]["prompt_tokens"] == len(TEXT) + 1
    assert (await pair.complete(TEXT, add_special_tokens=False))["usage"]["prompt_tokens"] == len(TEXT)
    assert (await pair.complete(f"<bos>{TEXT}"))["usage"]["prompt_tokens"] == len(TEXT) + 1


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": []}, "prompt", "prompt must be a text, a list of token ids, or a list of either"),
        ({"prompt": ["a", 3]}, "prompt", "prompt must be a text, a list of token ids, or a list of either"),
        ({"prompt": [[1, "a"]]}, "prompt", "a prompt is a text, a list of token ids"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": 3}, "prompt", "prompt: expected str | array, got int"),
        ({"prompt": [100]}, "prompt", "token id 100 at index 0 is out of range: the tokenizer has 100 ids"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "max_tokens: expected int, got str"),
        (
            {"prompt": "a", "max_tokens": 0},
            "max_tokens",
            "of at least 1, got 0",
        ),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "max_tokens: expected int, got float"),
        ({"prompt": "a", "seed": 1e30}, "seed", "seed: expected int, got float"),
        ({"prompt": "a", "temperature": -1}, "temperature", "temperature must be at least 0, got -1"),
        ({"prompt": "a", "n": 0}, "n", "a request can have 1 to 1024 responses, got 0"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt", "a request can have 1 to 1024 responses, got 1200"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "logprobs must be between 0 and 20, got 21"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias", "logit_bias: expected int, got str"),
        ({"prompt": "a", "logit_bias": {"500": 1}}, "logit_bias", "logit_bias names token id 500"),
        (
            {"prompt": "a", "params": {"tua": 1}},
            "params.tua",
            "the recipe has no parameter 'tua'; it has: tau",
        ),
        (
            {"prompt": "a", "stream_options": {"include_usage": 3}},
            "stream_options.include_usage",
            "expected bool",
        ),
        ({"prompt": "a", "stop": [""]}, "stop", "of at least one character"),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(
    pair: Served, body: dict[str, Any], param: str, message: str
) -> None:
    reply = await pair.post("/v1/completions", body)
    assert reply.status == 400
    assert (reply.error["type"], reply.error["code"]) == ("invalid_request_error", "invalid_value")
    assert reply.error["param"] == param
    assert message in reply.error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("suffix", "x"),
        ("guided_json", {"type": "object"}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{}]),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("include_stop_str_in_output", True),
        ("chat_template", "{{ messages }}"),
        ("logprob_token_ids", [1]),
        ("spaces_between_special_tokens", False),
        ("repetition_detection", {"max_pattern_size": 2}),
        ("thinking_token_budget", 5),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("token_ids_logprob", [1]),
        ("return_entropy", True),
        ("return_routed_experts", True),
        ("audio_data", "x"),
        ("video_data", "x"),
    ],
)
async def test_what_would_change_the_answer_and_is_not_supported_is_refused(
    pair: Served, name: str, value: Any
) -> None:
    reply = await pair.post("/v1/completions", {"prompt": "a", name: value})
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", name)


async def test_what_streams_alone_have_is_refused_elsewhere(pair: Served) -> None:
    for stream, options, param in (
        (False, {"include_usage": True}, "stream_options"),
        (True, {"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        (True, {"continuous_usage_stats": False}, None),
    ):
        body = {"prompt": "a", "max_tokens": 1, "stream": stream, "stream_options": options}
        reply = await pair.post("/v1/completions", body)
        assert (reply.status, param and reply.error["param"]) == (400 if param else 200, param)


async def test_off_values_of_what_is_not_supported_are_accepted(pair: Served) -> None:
    keys: dict[str, Any] = {"audio_data": None, "kv_transfer_params": {}, "return_entropy": False}
    await pair.complete("a", max_tokens=1, **keys, spaces_between_special_tokens=True)


async def test_a_prompt_that_does_not_fit_is_refused_with_the_figures(pair: Served) -> None:
    for body in ({"prompt": [5] * 1024}, {"prompt": [5] * 1000, "max_tokens": 30}):
        reply = await pair.post("/v1/completions", body)
        assert reply.status == 400
        assert reply.error["code"] == "context_length_exceeded"
        assert "1024" in reply.error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"prompt": "\\ud800"}', b"\xff", b"[" * 100_000])
async def test_what_is_not_json_is_refused_in_a_few_words(pair: Served, body: bytes) -> None:
    reply = await pair.post("/v1/completions", body)
    assert reply.status == 400
    assert len(reply.body) < 1000
    assert reply.error["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large_is_not_read(pair: Served) -> None:
    headers = {"content-length": str(2**30)}
    reply = await pair.ask("POST", "/v1/completions", b"{", headers)
    assert reply.status == 413
    assert reply.error["code"] == "request_too_large"
