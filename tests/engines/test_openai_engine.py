"""The openai engine against a real endpoint on loopback: what it asks, and what it makes of the answers."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch

from tests.endpoint import (
    EOS,
    MODEL,
    VOCAB,
    Endpoint,
    Handler,
    broken_after,
    hang_up,
    held,
    pinging,
    said,
    status,
)
from tests.recipes import DEMO
from tests.toy.engine import toy_logits
from tokenflow.engines.base import Engine, Extend
from tokenflow.engines.openai import OpenAIEngine
from tokenflow.errors import EngineError, ModelLoadError
from tokenflow.routing.signals import Signals
from tokenflow.types import EndpointConfig, ModelConfig

SPEAKERS = ("ids", "sglang", "llama", "plain")
PROMPT = [5, 9, 14]

Open = Callable[..., OpenAIEngine]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.engines.openai.engine.PAUSE_S", 0.0)


@pytest.fixture
def connect() -> Iterator[Open]:
    """Make engines for an endpoint."""
    made: list[OpenAIEngine] = []

    def build(endpoint: Endpoint, **remote: object) -> OpenAIEngine:
        config = EndpointConfig(base_url=endpoint.url, **remote)  # type: ignore[arg-type]
        made.append(OpenAIEngine(ModelConfig(path=str(DEMO / "small"), endpoint=config)))
        endpoint.requests.clear()
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def peaked(ids: Sequence[int]) -> torch.Tensor:
    """Logits whose best token is a letter; ids from 100 on have no text of their own."""
    logits = toy_logits(list(ids), VOCAB)
    logits[EOS] = logits[100:] = -20.0
    logits[20 + (sum(ids) * 7 + len(ids)) % 60] += 19.0
    return logits


def greedy(ids: Sequence[int], count: int, logits: Callable[[Sequence[int]], torch.Tensor]) -> list[int]:
    """The greedy continuation."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(logits(tokens).argmax()))
    return tokens[len(ids) :]


def write(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """What an engine writes greedily after a prompt."""
    slot, _ = engine.open(prompt)
    tokens: list[int] = []
    feed = list(prompt)
    for _ in range(count):
        output = engine.step([Extend(slot, feed)])
        assert not output.failed
        tokens.append(int(output.logits[0, :VOCAB].argmax()))
        feed = tokens[-1:]
    engine.release(slot)
    return tokens


@pytest.mark.parametrize("speaks", SPEAKERS)
@pytest.mark.parametrize("span", [1, 8])
def test_what_it_writes_is_what_the_model_behind_the_endpoint_writes(
    connect: Open, speaks: str, span: int
) -> None:
    with Endpoint(speaks, peaked) as endpoint:
        engine = connect(endpoint, span=span)
        assert write(engine, PROMPT, 20) == greedy(PROMPT, 20, peaked)
        assert len(endpoint.requests) == math.ceil(20 / span)
        prompts = [body["prompt"] for body in endpoint.requests]
        assert [len(prompt) for prompt in prompts] == list(range(3, 23, span))
        assert all(body["model"] == MODEL and body["temperature"] == 0 for body in endpoint.requests)


@pytest.mark.parametrize("speaks", SPEAKERS)
def test_confidence_margin_and_log_probability_are_those_of_all_logits(connect: Open, speaks: str) -> None:
    with Endpoint(speaks, peaked) as endpoint:
        engine = connect(endpoint)
        slot, _ = engine.open(PROMPT)
        row = engine.step([Extend(slot, PROMPT)]).logits
        token = row[:, :VOCAB].argmax(-1)
        listed, whole = Signals(row, token), Signals(peaked(PROMPT)[None], token)
        for name in ("confidence", "margin", "logprob"):
            torch.testing.assert_close(getattr(listed, name)(), getattr(whole, name)(), rtol=1e-5, atol=1e-6)
        # The tokens that are not listed share what is left, and none beats one that is listed.
        assert row[0, :VOCAB].topk(2).values[0] > row[0, :VOCAB].median()
        assert float(row.exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_without_log_probabilities_there_is_the_token_alone(connect: Open) -> None:
    with Endpoint("silent", peaked) as endpoint:
        engine = connect(endpoint, top_logprobs=0)
        assert write(engine, PROMPT, 10) == greedy(PROMPT, 10, peaked)
        assert "logprobs" not in endpoint.requests[0]


def test_a_token_that_is_not_the_endpoints_own_starts_a_new_span(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, span=8)
        slot, _ = engine.open(PROMPT)
        own = int(engine.step([Extend(slot, PROMPT)]).logits[0, :VOCAB].argmax())
        other = 77 if own != 77 else 78
        row = engine.step([Extend(slot, [other])]).logits[0]
        assert int(row[:VOCAB].argmax()) == int(peaked([*PROMPT, other]).argmax())
        assert [body["prompt"] for body in endpoint.requests] == [PROMPT, [*PROMPT, other]]
        engine.truncate(slot, 2)
        row = engine.step([Extend(slot, [own])]).logits[0]
        assert int(row[:VOCAB].argmax()) == int(peaked([*PROMPT[:2], own]).argmax())


@pytest.mark.parametrize("speaks", SPEAKERS)
def test_an_end_is_a_token_wherever_the_endpoint_puts_it(connect: Open, speaks: str) -> None:
    def ending(ids: Sequence[int]) -> torch.Tensor:
        logits = peaked(ids)
        if len(ids) == 6:
            logits[EOS] = 30.0
        return logits

    with Endpoint(speaks, ending) as endpoint:
        engine = connect(endpoint)
        assert write(engine, PROMPT, 4) == [*greedy(PROMPT, 3, ending), EOS]


def test_rows_are_asked_for_at_the_same_time(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint)
        together = Barrier(3, timeout=20)

        def meet(handler: Handler) -> bool:
            together.wait()
            return False

        endpoint.faults.extend([meet] * 3)
        prompts = [[5, n] for n in range(3)]
        slots = [engine.open(prompt).slot for prompt in prompts]
        rows = engine.step([Extend(slot, prompt) for slot, prompt in zip(slots, prompts, strict=True)]).logits
        assert rows[:, :VOCAB].argmax(-1).tolist() == [int(peaked(prompt).argmax()) for prompt in prompts]


def test_no_more_calls_are_open_than_allowed(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, concurrency=2, span=1)
        endpoint.busiest = 0
        slots = [engine.open([5, n]).slot for n in range(12)]
        engine.step([Extend(slot, [5, n]) for n, slot in enumerate(slots)])
        assert endpoint.busiest <= 2


@pytest.mark.parametrize("concurrency", [1, 2, 3, 5])
def test_calls_that_stay_open_between_steps_count(connect: Open, concurrency: int) -> None:
    prompts = {n: [5, n] for n in range(4)}
    expected = {n: greedy(prompt, 6, peaked) for n, prompt in prompts.items()}
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, concurrency=concurrency, span=8)
        slots = {n: engine.open(prompt).slot for n, prompt in prompts.items()}
        written: dict[int, list[int]] = {n: [] for n in prompts}
        feeds = dict(prompts)
        while feeds:
            # Rows come and go, as if some of them were at another model for a while.
            step = [n for n in feeds if len(feeds) < 3 or (n + len(written[0])) % 4 or n == 0]
            output = engine.step([Extend(slots[n], feeds[n]) for n in step])
            assert sum(slot.call is not None for slot in engine._slots.values()) <= concurrency
            for n, row in zip(step, output.logits, strict=True):
                written[n].append(int(row[:VOCAB].argmax()))
                feeds[n] = written[n][-1:]
                if len(written[n]) == 6:
                    del feeds[n]
        assert written == expected


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_the_endpoint_never_has_more_calls_open_than_allowed(concurrency: int) -> None:
    """It counts itself: calls that time out, break off, fail, and those of rows that leave or go back."""
    rng = random.Random(concurrency)
    never = Event()
    faults = [held(never), hang_up, broken_after(1), broken_after(3), status(503), status(400)]
    with Endpoint(logits=peaked) as endpoint:
        config = EndpointConfig(
            base_url=endpoint.url, concurrency=concurrency, span=8, timeout_s=0.1, retries=1
        )
        settings = ModelConfig(path=str(DEMO / "small"), endpoint=config)
        engine = OpenAIEngine(replace(settings, max_requests=6))
        endpoint.busiest, failures = 0, 0
        slots: dict[int, list[int]] = {}
        for _ in range(60):
            while len(slots) < 6:
                prompt = [5, rng.randrange(9, 90)]
                slots[engine.open(prompt).slot] = prompt
            if not endpoint.faults:
                endpoint.faults.extend([lambda _: False] * 3 + rng.choices(faults, k=2))
            step = rng.sample(sorted(slots), rng.randint(1, 6))
            output = engine.step([Extend(slot, slots[slot][engine.length(slot) :]) for slot in step])
            failures += len(output.failed)
            answered = [slot for row, slot in enumerate(step) if row not in output.failed]
            for slot, logits in zip(answered, output.logits, strict=True):
                token = int(logits[:VOCAB].argmax())
                assert token == int(peaked(slots[slot]).argmax())
                slots[slot].append(token)
            for slot in step:
                if slot not in answered or rng.random() < 0.1:
                    engine.release(slot)
                    del slots[slot]
                elif rng.random() < 0.1:
                    del slots[slot][2:]
                    engine.truncate(slot, 1)
        engine.close()
        never.set()
        assert failures
        assert min(concurrency, 2) <= endpoint.busiest <= concurrency


def test_connections_are_kept(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, span=2)
        write(engine, PROMPT, 16)
        assert len(endpoint.requests) == 8
        assert endpoint.connections <= 3


GIVEN_UP = {"choices": [{"text": "", "finish_reason": "abort"}]}


@pytest.mark.parametrize(
    "fault", [status(503), status(429, Retry_After="0"), hang_up, broken_after(0), said(GIVEN_UP)]
)
def test_what_may_pass_is_tried_again(connect: Open, fault: Callable[[Handler], bool]) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, retries=2)
        endpoint.faults.extend([fault, fault])
        assert write(engine, PROMPT, 5) == greedy(PROMPT, 5, peaked)
        assert len(endpoint.requests) == 3


def test_an_answer_that_breaks_off_goes_on_where_it_ended(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, span=8)
        endpoint.faults.append(broken_after(3))
        assert write(engine, PROMPT, 8) == greedy(PROMPT, 8, peaked)
        assert [len(body["prompt"]) for body in endpoint.requests] == [3, 6]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([status(400, "too long for me")], "answered 400: too long for me"),
        ([status(503, "overloaded")] * 2, "answered 503: overloaded"),
        ([status(502, "<html>\n <h1>Bad\r\n gateway")] * 2, "answered 502: <html> <h1>Bad gateway"),
        ([said(GIVEN_UP)] * 2, "gave up: finish_reason 'abort'"),
        ([hang_up] * 3, "RemoteDisconnected"),
    ],
)
def test_a_row_that_cannot_be_had_fails_alone(
    connect: Open, faults: list[Callable[[Handler], bool]], message: str
) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, retries=1, concurrency=1)
        slots = [engine.open(PROMPT).slot for _ in range(2)]
        endpoint.faults.extend(faults)
        output = engine.step([Extend(slot, PROMPT) for slot in slots])
        assert list(output.failed) == [0]
        assert message in output.failed[0]
        assert len(output.logits) == len(output.hidden) == 1
        assert int(output.logits[0, :VOCAB].argmax()) == int(peaked(PROMPT).argmax())


@pytest.mark.timeout(30)
def test_an_endpoint_that_does_not_stop_where_it_is_told_to_writes_the_same(connect: Open) -> None:
    """Also when it is first asked, which would otherwise never end."""
    with Endpoint(logits=peaked, endless=True) as endpoint:
        engine = connect(endpoint, span=2)
        assert write(engine, PROMPT, 12) == greedy(PROMPT, 12, peaked)
        assert len(endpoint.requests) == 1


def test_an_answer_that_does_not_come_fails_in_time(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, timeout_s=0.2, retries=0)
        never = Event()
        endpoint.faults.append(held(never))
        slot, _ = engine.open(PROMPT)
        output = engine.step([Extend(slot, PROMPT)])
        never.set()
        assert "did not answer within 0.2 s" in output.failed[0]


def test_a_call_that_did_not_come_is_made_again_in_the_default_proportions(connect: Open) -> None:
    timeout_s = 1.5
    defaults = ModelConfig(), EndpointConfig(base_url="")
    with Endpoint(logits=peaked) as endpoint:
        config = EndpointConfig(base_url=endpoint.url, timeout_s=timeout_s)
        settings = ModelConfig(path=str(DEMO / "small"), endpoint=config)
        share = defaults[0].step_timeout / defaults[1].timeout_s
        engine = OpenAIEngine(replace(settings, step_timeout=share * timeout_s))
        endpoint.requests.clear()
        never = Event()
        endpoint.faults.append(held(never))
        assert write(engine, PROMPT, 3) == greedy(PROMPT, 3, peaked)
        never.set()
        assert len(endpoint.requests) == 2
        engine.close()


def test_no_call_is_begun_that_could_take_longer_than_the_step(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        config = EndpointConfig(base_url=endpoint.url, timeout_s=6.0)
        settings = ModelConfig(path=str(DEMO / "small"), endpoint=config)
        engine = OpenAIEngine(replace(settings, step_timeout=8.0))
        endpoint.requests.clear()
        endpoint.faults.append(status(503, Retry_After="2"))
        slot, _ = engine.open(PROMPT)
        assert "answered 503" in engine.step([Extend(slot, PROMPT)]).failed[0]
        assert len(endpoint.requests) == 1
        engine.close()


@pytest.mark.parametrize("fault", [status(429, "later", Retry_After="3600"), status(503, Retry_After="inf")])
def test_a_pause_that_is_longer_than_the_step_is_not_begun(
    connect: Open, fault: Callable[[Handler], bool]
) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint)
        endpoint.faults.append(fault)
        slot, _ = engine.open(PROMPT)
        assert "answered" in engine.step([Extend(slot, PROMPT)]).failed[0]
        assert len(endpoint.requests) == 1


def test_rows_that_must_wait_too_long_for_others_fail_before_the_step_does() -> None:
    with Endpoint(logits=peaked) as endpoint:
        config = EndpointConfig(base_url=endpoint.url, concurrency=1, timeout_s=1.0, retries=0)
        settings = ModelConfig(path=str(DEMO / "small"), endpoint=config)
        engine = OpenAIEngine(replace(settings, step_timeout=2.0))
        endpoint.requests.clear()
        never = Event()
        endpoint.faults.append(held(never))
        slots = [engine.open(PROMPT).slot for _ in range(3)]
        failed = engine.step([Extend(slot, PROMPT) for slot in slots]).failed
        never.set()
        assert "did not answer within 1 s" in failed[0]
        assert all("too slow with other requests for this one" in failed[row] for row in (1, 2))
        assert len(endpoint.requests) == 1
        engine.close()


def test_signs_of_life_are_no_answer(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, timeout_s=0.3, retries=0)
        endpoint.faults.append(pinging)
        slot, _ = engine.open(PROMPT)
        assert "did not answer within 0.3 s" in engine.step([Extend(slot, PROMPT)]).failed[0]


def test_the_wait_for_a_first_token_begins_with_the_call(connect: Open) -> None:
    """However it is spread over the head of an answer and what follows."""

    def late(handler: Handler) -> bool:
        Event().wait(0.8)
        return pinging(handler)

    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, timeout_s=1.0, retries=0)
        endpoint.faults.append(late)
        slot, _ = engine.open(PROMPT)
        began = time.monotonic()
        assert "did not answer within 1 s" in engine.step([Extend(slot, PROMPT)]).failed[0]
        assert time.monotonic() - began < 1.6


NAN = float("nan")


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ("a", 'its choices are "a"'),
        ([None], "its choices are [null]"),
        ([{"text": "a"}], "a text without token ids"),
        ([{"text": "a", "token_ids": ["5"]}], "'5' for a token id"),
        ([{"text": "a", "token_ids": 5}], "it wrote"),
        ([{"text": "a", "token_ids": [128]}], "token id 128, and the model in the recipe has 128 tokens"),
        ([{"text": "a", "logprobs": [-1.0]}], "it wrote"),
        ([{"logprobs": {"tokens": ["token_id:5"], "token_logprobs": ["-1 nat"]}}], "-1 nat"),
        ([{"logprobs": {"tokens": ["token_id:5"], "token_logprobs": [NAN]}}], "nan for a log-probability"),
        ([{"logprobs": {"tokens": ["token_id:5"], "token_logprobs": [17.5]}}], "17.5 for a log-probability"),
        ([{"logprobs": {"tokens": ["token_id:5"], "token_logprobs": [10**400]}}], "it wrote"),
        ([{"logprobs": {"tokens": ["token_id:5"] * 2, "token_logprobs": [-1.0]}}], "it wrote"),
        ([{"logprobs": {"tokens": [["a"]]}}], "it wrote"),
        ([{"logprobs": {"content": [{"id": True, "logprob": -1.0}]}}], "True for a token id"),
        ([{"logprobs": {"content": [{"id": 5, "top_logprobs": [{"id": 6}]}]}}], "it wrote"),
    ],
)
def test_an_answer_that_makes_no_sense_fails_its_row_alone(connect: Open, choices: Any, why: str) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, concurrency=1)
        slots = [engine.open(PROMPT).slot for _ in range(2)]
        endpoint.faults.append(said({"choices": choices}))
        output = engine.step([Extend(slot, PROMPT) for slot in slots])
        assert list(output.failed) == [0]
        assert f"the answer of {endpoint.url} cannot be read" in output.failed[0]
        assert why in output.failed[0]
        assert int(output.logits[0, :VOCAB].argmax()) == int(peaked(PROMPT).argmax())


def test_alternatives_that_were_not_asked_for_do_no_harm(connect: Open) -> None:
    """More of them than asked for, and none by a name that is known."""
    nameless = {f"no such text {index}": -3.0 - index for index in range(40)}
    logprobs = {"tokens": ["token_id:5"], "token_logprobs": [-0.1], "top_logprobs": [nameless]}
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint, top_logprobs=3)
        endpoint.faults.append(said({"choices": [{"logprobs": logprobs}]}))
        slot, _ = engine.open(PROMPT)
        output = engine.step([Extend(slot, PROMPT)])
        assert int(output.logits[0, :VOCAB].argmax()) == 5
        assert output.known is not None
        assert output.known.tolist() == [1]


@pytest.mark.parametrize("body", [b"<ok>", b"[" * 100_000], ids=["html", "nested"])
def test_an_answer_that_is_no_json_fails_its_row(connect: Open, body: bytes) -> None:
    def garbage(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint)
        endpoint.faults.append(garbage)
        slot, _ = engine.open(PROMPT)
        assert f"sent no JSON object: {body[:4].decode()}" in engine.step([Extend(slot, PROMPT)]).failed[0]


def test_the_key_comes_from_the_environment_and_shows_nowhere(
    connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Endpoint(logits=peaked, key="s3cret") as endpoint:
        monkeypatch.setenv("SOME_KEY", "s3cret")
        assert write(connect(endpoint, api_key_env="SOME_KEY"), PROMPT, 2) == greedy(PROMPT, 2, peaked)
        monkeypatch.setenv("SOME_KEY", "0ther")
        with pytest.raises(ModelLoadError, match="answered 401: wrong key") as refused:
            connect(endpoint, api_key_env="SOME_KEY")
        assert str(refused.value).endswith("is the key (endpoint.api_key_env) right?")
        assert "0ther" not in str(refused.value)
        monkeypatch.setenv("SOME_KEY", "s3cret\r")
        with pytest.raises(ModelLoadError, match="SOME_KEY holds a line break") as refused:
            connect(endpoint, api_key_env="SOME_KEY")
        assert "s3cret" not in str(refused.value)
        monkeypatch.delenv("SOME_KEY")
        with pytest.raises(ModelLoadError, match="environment variable SOME_KEY is not set"):
            connect(endpoint, api_key_env="SOME_KEY")


def test_what_does_not_fit_is_told_when_the_model_loads(connect: Open) -> None:
    with Endpoint(logits=peaked, most=1) as endpoint:
        with pytest.raises(ModelLoadError, match=r"lists 1 token\(s\) .* set endpoint\.top_logprobs to 1"):
            connect(endpoint)
        connect(endpoint, top_logprobs=1)
        for empty in ({}, {"choices": []}, {"choices": [{"text": ""}]}):
            endpoint.faults.append(said(empty))
            with pytest.raises(ModelLoadError, match="cannot be read: it has no tokens"):
                connect(endpoint, top_logprobs=1)
    with pytest.raises(ModelLoadError, match=r"Connection refused; is endpoint\.base_url right"):
        connect(endpoint)
    with Endpoint("silent", peaked) as endpoint, pytest.raises(ModelLoadError, match=r"lists 0 token\(s\)"):
        connect(endpoint)
    with Endpoint(logits=peaked, card={"id": "x"}) as endpoint:
        assert connect(endpoint).info.context_length == 1024
    for url in ("ftp://x", "http://127.0.0.1:http/v1", "http://[::1/v1", "http:///v1", "http://x/v\u00e9"):
        with pytest.raises(ModelLoadError, match="must be like http"):
            OpenAIEngine(ModelConfig(path=str(DEMO / "small"), endpoint=EndpointConfig(base_url=url)))
    with pytest.raises(ModelLoadError, match=r"needs endpoint\.base_url"):
        OpenAIEngine(ModelConfig(path=str(DEMO / "small")))


@pytest.mark.parametrize("speaks", ["ids", "sglang", "silent", "llama"])
def test_a_model_that_has_other_texts_for_its_tokens_is_refused(connect: Open, speaks: str) -> None:
    with Endpoint(speaks, peaked) as endpoint:
        own = endpoint.text_of
        endpoint.text_of = lambda token: own(20 + (token - 19) % 60)  # type: ignore[method-assign]
        first, second = greedy([0], 2, peaked)
        texts = [own(first) + own(second), endpoint.text_of(first) + endpoint.text_of(second)]
        with pytest.raises(ModelLoadError, match="is it the same model") as refused:
            connect(endpoint, top_logprobs=0 if speaks == "silent" else 20)
        message = str(refused.value)
        assert f"it writes {texts[1]!r} for the token ids [{first}, {second}], and the model in" in message
        assert f"in the recipe {texts[0]!r}: is it" in message


@pytest.mark.parametrize("shown", ["", " ", "  {0} {1} ", "{0}", "\ufffd", "{0}\ufffd"])
def test_a_text_that_shows_less_or_has_other_spaces_is_that_of_the_same_model(
    connect: Open, shown: str
) -> None:
    with Endpoint(logits=peaked) as endpoint:
        texts = [endpoint.text_of(token) for token in greedy([0], 2, peaked)]
        pieces = iter([shown.format(*texts), ""])
        own = endpoint.piece
        endpoint.piece = lambda *given: {**own(*given), "text": next(pieces)}  # type: ignore[method-assign]
        connect(endpoint)


def test_a_special_token_that_is_not_shown_is_no_other_model(connect: Open) -> None:
    def begins_with_an_end(ids: Sequence[int]) -> torch.Tensor:
        logits = peaked(ids)
        logits[EOS] = 40.0 if len(ids) == 1 else -20.0
        return logits

    with Endpoint(logits=begins_with_an_end) as endpoint:
        own = endpoint.text_of
        endpoint.text_of = lambda token: "" if token == EOS else own(token)  # type: ignore[method-assign]
        connect(endpoint)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://[::1]/v1", ("::1", 80)),
        ("https://[fe80::1]/v1", ("fe80::1", 443)),
        ("http://[::1]:8000/v1", ("::1", 8000)),
        ("http://x/v1", ("x", 80)),
    ],
)
def test_a_url_without_a_port_has_that_of_its_scheme(
    monkeypatch: pytest.MonkeyPatch, url: str, address: tuple[str, int]
) -> None:
    called: list[tuple[str, int]] = []

    def refuse(asked: tuple[str, int], *rest: object) -> None:
        called.append(asked)
        raise ConnectionRefusedError

    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(ModelLoadError, match="ConnectionRefusedError"):
        OpenAIEngine(ModelConfig(path=str(DEMO / "small"), endpoint=EndpointConfig(base_url=url)))
    assert called == [address]


def test_a_list_of_models_that_makes_no_sense_names_none(connect: Open) -> None:
    with Endpoint(logits=peaked, card={"id": MODEL, "max_model_len": "long"}) as endpoint:
        assert connect(endpoint).info.context_length == 1024
        endpoint.card = ["no", "cards"]  # type: ignore[assignment]
        with pytest.raises(ModelLoadError, match=r"lists no models: set endpoint\.model_id"):
            connect(endpoint)
        assert write(connect(endpoint, model_id=MODEL), PROMPT, 2) == greedy(PROMPT, 2, peaked)


def test_the_size_of_the_vocabulary_is_read_wherever_a_configuration_has_it(tmp_path: Path) -> None:
    facts = json.loads((DEMO / "small" / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "small" / "tokenizer.json").read_bytes())
    with Endpoint(logits=peaked) as endpoint:
        config = ModelConfig(path=str(tmp_path), endpoint=EndpointConfig(base_url=endpoint.url))
        (tmp_path / "config.json").write_text(json.dumps({"text_config": facts}))
        engine = OpenAIEngine(config)
        assert write(engine, PROMPT, 2) == greedy(PROMPT, 2, peaked)
        engine.close()
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelLoadError, match=r"config\.json has no vocab_size"):
            OpenAIEngine(config)


def test_what_an_endpoint_does_not_show_is_refused(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        engine = connect(endpoint)
        slot, _ = engine.open(PROMPT)
        with pytest.raises(EngineError, match="last position only"):
            engine.step([Extend(slot, PROMPT, "all")])
        with pytest.raises(EngineError, match="does not score"):
            engine.score(PROMPT)
        with pytest.raises(ModelLoadError, match="embeddings"):
            _ = engine.embeddings


def test_the_endpoints_own_choice_wins_a_tie(connect: Open) -> None:
    def tied(ids: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(VOCAB, dtype=torch.float64)
        logits[40], logits[50] = 5.0, 5.0 + 1e-9
        return logits

    with Endpoint(logits=tied) as endpoint:
        assert write(connect(endpoint), PROMPT, 3) == [50, 50, 50]


def test_a_context_bounds_what_is_asked_for(connect: Open) -> None:
    with Endpoint(logits=peaked) as endpoint:
        config = EndpointConfig(base_url=endpoint.url, span=8)
        settings = ModelConfig(path=str(DEMO / "small"), endpoint=config, context_length=6)
        engine = OpenAIEngine(replace(settings, max_requests=2))
        assert (engine.info.context_length, engine.info.kv_capacity) == (6, 12)
        endpoint.requests.clear()
        write(engine, PROMPT, 1)
        assert endpoint.requests[0]["max_tokens"] == 3
        engine.close()
