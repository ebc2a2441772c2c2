from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.conftest import DEMO
from tokenflow.text.detokenizer import Detokenizer
from tokenflow.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", params=["demo", "byte_level", "byte_fallback", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(directories[request.param])


def stream(tokenizer: Tokenizer, ids: list[int], cuts: set[int]) -> list[str]:
    """The text of each push when ``ids`` arrive in pieces cut at ``cuts``, and of the finish."""
    detokenizer = Detokenizer(tokenizer)
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
    pieces = [ids[a:b] for a, b in pairwise(bounds)]
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_ids_in_any_pieces_give_the_text_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=16))
    cuts = data.draw(st.sets(st.integers(0, 16)))
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_replacement_character_ever_shows_in_the_middle_of_a_character(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    shown = stream(tokenizer, ids, set(range(len(ids))))
    assert "\ufffd" not in "".join(shown)
    assert shown[-1] == ""


def test_a_character_over_four_tokens_comes_with_the_last(directories: dict[str, Path]) -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = Tokenizer.load(directories[kind])
        ids = tokenizer.encode("\U00010000", add_special_tokens=False)[-4:]
        assert tokenizer.decode(ids) == "\U00010000"
        assert stream(tokenizer, ids, {1, 2, 3}) == ["", "", "", "\U00010000", ""]


def test_a_character_that_stays_incomplete_is_flushed_at_the_end(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["byte_level"])
    four = tokenizer.encode("\U00010000")
    assert stream(tokenizer, four[:3], {1, 2}) == ["", "", "", "\ufffd"]
    # The next token shows that it can no longer become one.
    assert stream(tokenizer, [*four[:3], *tokenizer.encode("a")], {3}) == ["", "\ufffda", ""]


def test_special_tokens_add_nothing_even_inside_a_character(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["byte_level"])
    a, b, c, d = tokenizer.encode("\U00010000")
    end = tokenizer.tokens.index("<|im_end|>")
    assert stream(tokenizer, [end, a, b, end, c, d, end], {3, 4}) == ["", "", "\U00010000", ""]


def test_a_leading_space_is_lost_once_and_not_after_special_tokens(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["byte_fallback"])
    ids = tokenizer.encode("ab ab")
    assert ids[0] == tokenizer.bos_id
    assert stream(tokenizer, [*ids, tokenizer.eos_ids[0], *ids], {1, 2, 3, 4, 5}) == [
        "", "ab", " ab", "", "", " ab ab", "",
    ]  # fmt: skip


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    tokenizer = Tokenizer.load(DEMO / "small")
    looked_up: list[int] = []

    class Counting:
        special_ids = tokenizer.special_ids

        def piece(self, token_id: int, *, first: bool) -> bytes:
            looked_up.append(token_id)
            return tokenizer.piece(token_id, first=first)

    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]
    ids = [5 + i % 90 for i in range(8000)]
    assert "".join(detokenizer.push([i]) for i in ids) == tokenizer.decode(ids)
    assert looked_up == ids


def test_special_tokens_show_where_they_are_asked_for() -> None:
    tokenizer = Tokenizer.load(DEMO / "small")
    ids = [1, *tokenizer.encode("ab", add_special_tokens=False), 2]
    for special in (False, True):
        detokenizer = Detokenizer(tokenizer, special=special)
        shown = detokenizer.push(ids) + detokenizer.finish()
        assert shown == tokenizer.decode(ids, skip_special_tokens=not special)
        assert shown == ("<bos>ab<eos>" if special else "ab")
