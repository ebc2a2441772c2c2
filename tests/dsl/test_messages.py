"""Messages between models, and the view of a request that a recipe makes them from."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.dsl.messages import PeerReq, RequestView, Tokens, send


def view(**changes: Any) -> RequestView:
    """A request with the prompt 1 2 3, the output 4 5, and the token 6 just sampled."""
    values: dict[str, Any] = {
        "rid": 7,
        "tokens": [1, 2, 3, 4, 5],
        "prompt_tokens": 3,
        "sampled": 6,
        "peer": 2,
        "peer_locs": [None, 5, 4],
        "params": {"tau": 0.5},
    }
    return RequestView(**values | changes)


def test_a_message_says_where_its_suffix_begins() -> None:
    message = PeerReq(rid=1, token_ids=[4, 5], loc=6)
    assert (message.base, message.finished, message.extra) == (4, False, {})


def test_extra_fields_are_attributes_of_a_message() -> None:
    message = PeerReq(1, [4], 5, score=0.5, reason="why")
    assert (message.score, message.reason, message.extra) == (0.5, "why", {"score": 0.5, "reason": "why"})
    with pytest.raises(AttributeError, match="this PeerReq has no field 'scor'"):
        _ = message.scor
    assert not hasattr(PeerReq(1, [4], 5), "score")


@pytest.mark.parametrize("name", ["base", "extra"])
def test_an_extra_field_cannot_hide_one_of_the_message(name: str) -> None:
    with pytest.raises(TypeError, match='a PeerReq has "base" and "extra" already'):
        PeerReq(1, [4], 5, **{name: 1})


def test_a_message_is_frozen_and_compares_by_value() -> None:
    message = PeerReq(1, [4], 5, score=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.loc = 6  # type: ignore[misc]
    assert message == PeerReq(rid=1, token_ids=[4], loc=5, finished=False, score=0.5)
    assert message != PeerReq(1, [4], 5, score=0.25)
    assert repr(message) == "PeerReq(rid=1, token_ids=[4], loc=5, finished=False, extra={'score': 0.5})"


def test_a_view_shows_prompt_and_output_with_the_sampled_token() -> None:
    assert (view().origin_input_ids, view().output_ids, len(view())) == ([1, 2, 3], [4, 5, 6], 6)
    arrived = view(sampled=None)
    assert (arrived.origin_input_ids, arrived.output_ids, len(arrived)) == ([1, 2, 3], [4, 5], 5)
    assert view(sampled=0).output_ids == [4, 5, 0]


def test_a_view_gives_lists_that_are_the_callers_own() -> None:
    request = view()
    request.origin_input_ids.append(9)
    request.output_ids.clear()
    assert (request.origin_input_ids, request.output_ids, request.tokens) == (
        [1, 2, 3],
        [4, 5, 6],
        [1, 2, 3, 4, 5],
    )


@given(st.lists(st.integers(0, 9), max_size=8), st.data())
def test_tokens_are_read_as_a_list_of_the_first_is(ids: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(ids)))
    tokens, first = Tokens(ids, length), ids[:length]
    assert tokens == first and tokens == tuple(first) and tokens == Tokens(first, length)
    assert tokens != [*first, 1]
    assert (tokens == Tokens(ids, 0)) is not bool(length)
    assert (list(tokens), len(tokens), repr(tokens)) == (first, length, repr(first))
    part = data.draw(st.slices(8))
    assert tokens[part] == first[part]
    for index in range(-10, 10):
        if -length <= index < length:
            assert tokens[index] == first[index]
        else:
            with pytest.raises(IndexError):
                _ = tokens[index]


def test_tokens_cannot_be_changed_and_a_message_keeps_those_that_it_was_made_of() -> None:
    ids = [1, 2, 3]
    tokens = Tokens(ids, 3)
    message = PeerReq(1, tokens, 3)
    tokens[:].clear()
    for change in ("append", "clear", "pop", "extend", "insert", "remove", "sort", "reverse", "__setitem__"):
        assert not hasattr(tokens, change)
    ids.append(4)
    ids[0] = 9
    assert message.token_ids == [1, 2, 3]


def test_a_view_tells_whether_the_response_is_over() -> None:
    assert view().finished() is False
    assert view(ended=True).finished() is True
    assert view(ended=True).keep().finished is True


def test_keep_and_drop_last_send_what_the_peer_has_not_seen() -> None:
    assert view().keep() == PeerReq(7, [5, 6], 6)
    assert view().drop_last() == PeerReq(7, [5], 5)
    assert view(peer=1).keep() == PeerReq(7, [6], 6)
    assert view(peer=1).drop_last() == PeerReq(7, [], 5)
    assert view(peer=0).keep(score=0.5) == PeerReq(7, [1, 2, 3, 4, 5, 6], 6, score=0.5)
    assert view(peer=0).drop_last(score=0.5) == PeerReq(7, [1, 2, 3, 4, 5], 5, score=0.5)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_keep_and_drop_last_are_the_sends_of_rules(tokens: list[int], data: st.DataObject) -> None:
    anchor = data.draw(st.integers(0, len(tokens)))
    request = view(tokens=tokens, prompt_tokens=1, peer_locs=[None, 0, anchor])
    assert request.keep() == send(7, tokens, 6, anchor, "keep")
    assert request.drop_last() == send(7, tokens, 6, anchor, "drop_last")
