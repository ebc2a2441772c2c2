from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.conftest import DEMO
from tokenflow.text.stop import TextStep
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.text.transcript import Transcript


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO / "small")


@pytest.fixture(scope="session")
def byte_level(directories: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(directories["byte_level"])


def characters(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_every_token_gets_the_text_it_adds(tokenizer: Tokenizer) -> None:
    transcript = Transcript(tokenizer, ["stop!"])
    steps = [transcript.advance(i) for i in characters(tokenizer, "so st, stop!")]
    assert [step.text for step in steps] == ["", "so", " ", "", "", "st,", " ", "", "", "", "", ""]
    assert [step.stopped for step in steps] == [False] * 11 + [True]
    assert transcript.text == "so st, "
    assert transcript.stopped


def test_stop_strings_count_after_min_tokens_even_where_they_begin_before(tokenizer: Tokenizer) -> None:
    for min_tokens, text in ((0, "a "), (3, "a "), (4, "a ab "), (7, "a ab ab ")):
        transcript = Transcript(tokenizer, ["ab"], min_tokens=min_tokens)
        for token_id in characters(tokenizer, "a ab ab "):
            transcript.advance(token_id)
        transcript.finish()
        assert transcript.text == text, min_tokens
        assert transcript.matched == ("ab" if min_tokens < 7 else None)


def test_text_after_a_stop_string_is_cut(byte_level: Tokenizer) -> None:
    transcript = Transcript(byte_level, ["\nUser:"])
    ids = characters(byte_level, "Hello there\nUser: and more\nUser: hi")
    for token_id in ids:
        transcript.advance(token_id)
    assert transcript.finish() == TextStep("", True)
    assert transcript.text == "Hello there"


def test_what_is_held_at_the_end_belongs_to_the_text(byte_level: Tokenizer) -> None:
    transcript = Transcript(byte_level, ["END\ufffd?"])
    four = characters(byte_level, "\U00010000")
    for token_id in [*characters(byte_level, "the EN"), *characters(byte_level, "D"), *four[:2]]:
        transcript.advance(token_id)
    assert transcript.text == "the "
    assert transcript.finish() == TextStep("END\ufffd", False)
    assert transcript.text == "the END\ufffd"


def test_the_flushed_end_of_a_text_can_complete_a_stop_string(byte_level: Tokenizer) -> None:
    transcript = Transcript(byte_level, ["\ufffd"])
    transcript.advance(characters(byte_level, "\U00010000")[0])
    assert transcript.finish() == TextStep("", True)


def test_special_and_hidden_tokens_never_show(tokenizer: Tokenizer) -> None:
    a, b, c = characters(tokenizer, "abc")
    transcript = Transcript(tokenizer, [], hidden={b})
    assert [transcript.advance(i).text for i in (a, b, tokenizer.eos_ids[0], c)] == ["a", "", "", "c"]
    assert transcript.text == "ac"


def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Transcript(tokenizer).advance(127)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_attributed_texts_add_up_to_the_whole_text_before_the_stop(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    ids = byte_level.encode(text)
    whole = byte_level.decode(ids)
    stops = data.draw(st.lists(st.text(min_size=1, max_size=2), max_size=1))
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + 3])
    transcript = Transcript(byte_level, stops)
    shown = ""
    for token_id in ids:
        step = transcript.advance(token_id)
        shown += step.text
        assert shown == transcript.text
        if step.stopped:
            break
    shown += transcript.finish().text
    ends = [end for end in range(1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    longest = max((len(stop) for stop in stops if ends and whole[: ends[0]].endswith(stop)), default=0)
    assert shown == transcript.text == (whole[: ends[0] - longest] if ends else whole)
    assert transcript.stopped == bool(ends)
