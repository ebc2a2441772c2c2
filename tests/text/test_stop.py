from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenflow.text.stop import StopMatcher, TextStep

AB = st.text("ab", max_size=9)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str]) -> int | None:
    """Where the text ends: the start of the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end - max(map(len, complete))
    return None


def held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that a stop string properly begins with."""
    suffixes = [text[start:] for start in range(len(text))]
    return max((len(x) for x in suffixes if any(s.startswith(x) and s != x for s in stops)), default=0)


def check(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, seen = "", ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown, seen = shown + text, seen + piece
        end = cut(seen, stops)
        assert stopped == (end is not None)
        assert shown == (seen[: len(seen) - held(seen, stops)] if end is None else seen[:end])
    end = cut(seen, stops)
    assert shown + matcher.flush() == (seen if end is None else seen[:end])


@given(text=AB, stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_every_split_shows_what_a_naive_search_finds(text: str, stops: list[str]) -> None:
    for cuts in product([False, True], repeat=max(len(text) - 1, 0)):
        pieces = [""]
        for character, new in zip(text, (False, *cuts), strict=False):
            if new:
                pieces.append("")
            pieces[-1] += character
        check(pieces, stops)


@given(
    pieces=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=6),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_unicode_texts_show_what_a_naive_search_finds(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    stops = data.draw(st.lists(st.text(min_size=1, max_size=3), max_size=2))
    if text:
        start = data.draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + data.draw(st.integers(1, 5))])
    check(pieces, stops)


def test_without_stop_strings_all_text_passes_at_once() -> None:
    matcher = StopMatcher()
    assert matcher.push("any text") == TextStep("any text", False)
    assert matcher.flush() == ""


def test_a_prefix_is_held_until_it_is_decided() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("hello\n") == ("hello", False)
    assert matcher.push("Us") == ("", False)
    assert matcher.push("ual\nUser") == ("\nUsual", False)
    assert matcher.push(": more") == ("", True)
    assert matcher.push("and more") == ("", True)
    assert matcher.flush() == ""


def test_no_more_than_the_longest_possible_prefix_is_held() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aaaa") == ("aa", False)
    assert matcher.push("c") == ("aac", False)


@given(pieces=st.lists(AB, max_size=6), early=st.integers(0, 6), stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_a_stop_string_that_an_early_piece_completes_belongs_to_the_text(
    pieces: list[str], early: int, stops: list[str]
) -> None:
    text, start = "".join(pieces), len("".join(pieces[:early]))
    found = [
        (end, max(complete, key=len))
        for end in range(start + 1, len(text) + 1)
        if (complete := [stop for stop in stops if text[:end].endswith(stop)])
    ]
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(p, may_stop=i >= early).text for i, p in enumerate(pieces)) + matcher.flush()
    assert matcher.matched == (found[0][1] if found else None)
    assert shown == (text[: found[0][0] - len(found[0][1])] if found else text)


@pytest.mark.parametrize("stops", [["b", "abc"], ["abc", "b"]])
def test_the_stop_string_that_is_complete_first_decides(stops: list[str]) -> None:
    assert StopMatcher(stops).push("xabc") == ("xa", True)


@pytest.mark.parametrize("stops", [["bc", "abc", "c"], ["c", "bc", "abc"]])
def test_of_those_complete_together_the_one_that_begins_first_decides(stops: list[str]) -> None:
    assert StopMatcher(stops).push("xabc") == ("x", True)
