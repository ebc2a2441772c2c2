"""Streamed text is the text: characters that several models write together, stop strings, held text."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.recipes import recipe_of, toy_model
from tests.server.conftest import Served, serving
from tests.text.conftest import save
from tokenflow.dsl.ir import RecipeIR

pytestmark = pytest.mark.anyio

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<pad>", "<bos>", "<eos>", "<marker>"]
MARKER = 3
ALPHABET = "aZ 9\n.é漢字🙂👩\u200d👩\u200d👧🇫🇷ß한\u0301"
PROMPTS = 500


def text_of(number: int) -> str:
    """A text with characters of one to four bytes, the same for the same number."""
    source = random.Random(number)
    return "".join(source.choice(ALPHABET) for _ in range(source.randint(1, 14)))


def bytewise(folder: Path) -> RecipeIR:
    """Two models that take turns, one byte each."""
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *BYTES])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    engine = f"{Path(__file__).parents[1] / 'toy' / 'echo.py'}:EchoEngine"
    members = []
    for code, name in enumerate(("slm", "llm"), 1):
        model = toy_model(folder, name, code, vocab_size=len(SPECIAL) + 256, marker=MARKER)
        save(folder / name, tokenizer, {"bos_token": "<bos>", "eos_token": "<eos>"})
        members.append(replace(model, config=replace(model.config, engine=engine)))
    each = (">", ("signal", "run_length"), ("number", 0))
    rules: dict[str, Any] = {"slm": ((each, "llm", "keep"),), "llm": ((each, "slm", "keep"),)}
    return recipe_of(tuple(members), rules)


@pytest.fixture(scope="module")
async def bytes_pair(tmp_path_factory: pytest.TempPathFactory, pair: Served) -> AsyncIterator[Served]:
    """Begun after the server of all tests, since servers of fixtures must end in the opposite order."""
    async with serving(bytewise(tmp_path_factory.mktemp("bytes"))) as served:
        yield served


def prompt_of(text: str) -> str:
    return f"<bos>{text}<marker>"


async def test_500_streams_are_the_texts_that_are_not_streamed_byte_for_byte(bytes_pair: Served) -> None:
    todo = iter(range(PROMPTS))
    split = 0

    async def work() -> None:
        nonlocal split
        for number in todo:
            text = text_of(number)
            settings: dict[str, Any] = {"max_tokens": 200, "return_models": True}
            whole = await bytes_pair.complete(prompt_of(text), **settings)
            events = await bytes_pair.complete(prompt_of(text), stream=True, **settings)
            pieces = [event["choices"][0]["text"] for event in events]
            assert whole["choices"][0]["text"] == text
            assert "".join(pieces) == text
            assert all("\ufffd" not in piece for piece in pieces)
            writers = whole["choices"][0]["tokenflow"]["models"]
            assert set(writers) == {"slm", "llm"} or len(writers) == 1
            split += any(len(character.encode()) > 1 for character in text)

    async with anyio.create_task_group() as tasks:
        for _ in range(16):
            tasks.start_soon(work)
    assert split > PROMPTS // 2, "too few characters were split between the models"


async def test_a_character_that_stays_half_is_replaced_at_the_end_in_both(bytes_pair: Served) -> None:
    for count in range(1, 8):
        settings = {"max_tokens": count, "logprobs": 0}
        whole = await bytes_pair.complete(prompt_of("a漢🙂"), **settings)
        events = await bytes_pair.complete(prompt_of("a漢🙂"), stream=True, **settings)
        text = whole["choices"][0]["text"]
        assert text == "a漢🙂".encode()[:count].decode(errors="replace")
        assert "".join(event["choices"][0]["text"] for event in events) == text
    tokens = whole["choices"][0]["logprobs"]["tokens"]
    assert tokens[:2] == ["a", r"bytes:\xe6"]
    offsets = whole["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("stop", ["漢字", "字🙂", ["zzz", "\U0001f642"], "b漢", ["字", "漢字"]])
async def test_a_stop_string_over_models_is_never_sent_nor_waited_for_too_long(
    bytes_pair: Served, stop: str | list[str]
) -> None:
    text = "ab漢漢字🙂字bc"
    settings: dict[str, Any] = {"max_tokens": 100, "stop": stop}
    whole = await bytes_pair.complete(prompt_of(text), **settings)
    events = await bytes_pair.complete(prompt_of(text), stream=True, **settings)
    stops = [stop] if isinstance(stop, str) else stop
    ends = [text.find(s) + len(s) for s in stops if s in text]
    end = min(ends)
    begin = min(text.find(s) for s in stops if s in text and text.find(s) + len(s) == end)
    assert whole["choices"][0]["text"] == text[:begin]
    assert whole["choices"][0]["finish_reason"] == "stop"
    shown = ""
    for count, event in enumerate(events, 1):
        shown += event["choices"][0]["text"]
        certain = text.encode()[:count].decode(errors="ignore")
        held = max(
            (n for s in stops for n in range(len(s)) if certain.endswith(s[:n])),
            default=0,
        )
        if event["choices"][0]["finish_reason"] is None:
            assert shown == certain[: len(certain) - held]
    assert shown == text[:begin]


async def test_logprobs_of_a_stream_stay_with_their_tokens_while_text_is_held(bytes_pair: Served) -> None:
    settings: dict[str, Any] = {"max_tokens": 100, "stop": "字🙂🙂", "logprobs": 2}
    whole = await bytes_pair.complete(prompt_of("漢字🙂b🙂"), **settings)
    events = await bytes_pair.complete(prompt_of("漢字🙂b🙂"), stream=True, **settings)
    (choice,) = whole["choices"]
    for key, values in choice["logprobs"].items():
        streamed = [value for event in events for value in event["choices"][0]["logprobs"][key]]
        if key != "text_offset":
            assert streamed == values, key
    assert choice["text"] == "漢字🙂b🙂"
