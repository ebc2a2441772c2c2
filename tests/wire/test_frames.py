"""Frames: every message survives them, however the bytes arrive, and nothing else does."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.strategies import TO_ROUTER, TO_WORKER
from tokenflow.errors import ProtocolError
from tokenflow.types import SamplingParams
from tokenflow.wire.channel import MAX_FRAME, FrameReader, decode_to_router, decode_to_worker, encode
from tokenflow.wire.messages import Failure, Open, Step, Stop, ToRouter, ToWorker

STOP = encode(Stop())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """``data`` in pieces, cut at the given places."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@given(messages=st.lists(TO_WORKER, max_size=4), places=st.lists(st.integers(0, 10**6), max_size=8))
def test_messages_to_a_worker_survive_the_wire_in_any_pieces(
    messages: list[ToWorker], places: list[int]
) -> None:
    reader = FrameReader()
    pieces = cut(b"".join(map(encode, messages)), places)
    got = [decode_to_worker(payload) for piece in pieces for payload in reader.feed(piece)]
    assert got == messages


@given(messages=st.lists(TO_ROUTER, max_size=4), places=st.lists(st.integers(0, 10**6), max_size=8))
def test_messages_to_the_router_survive_the_wire_in_any_pieces(
    messages: list[ToRouter], places: list[int]
) -> None:
    reader = FrameReader()
    pieces = cut(b"".join(map(encode, messages)), places)
    got = [decode_to_router(payload) for piece in pieces for payload in reader.feed(piece)]
    assert got == messages


def test_a_frame_is_handed_out_with_its_last_byte() -> None:
    reader = FrameReader()
    for byte in STOP[:-1]:
        assert list(reader.feed(bytes([byte]))) == []
    assert list(reader.feed(STOP[-1:])) == [STOP[4:]]


@given(message=TO_WORKER | TO_ROUTER, places=st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_a_truncated_message_is_not_a_message(message: ToWorker | ToRouter, places: list[int]) -> None:
    payload = encode(message)[4:]
    for place in places:
        for decode in (decode_to_worker, decode_to_router):
            with pytest.raises(ProtocolError):
                decode(payload[: place % len(payload)])


@given(
    message=TO_WORKER | TO_ROUTER,
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), min_size=1, max_size=4),
)
def test_a_damaged_message_is_refused_or_read_as_another(
    message: ToWorker | ToRouter, edits: list[tuple[int, bytes]]
) -> None:
    payload = encode(message)[4:]
    for place, put in edits:
        at = place % len(payload)
        payload = (payload[:at] + put + payload[at + 1 :]) or b"\xc0"
    for decode in (decode_to_worker, decode_to_router):
        try:
            decode(payload)
        except ProtocolError as error:
            assert f"a frame of {len(payload)} bytes is not a message" in str(error)


@given(data=st.binary(max_size=64), places=st.lists(st.integers(0, 64), max_size=6))
def test_random_bytes_are_cut_by_their_lengths_or_refused(data: bytes, places: list[int]) -> None:
    reader = FrameReader()
    payloads: list[bytes] = []
    try:
        for piece in cut(data, places):
            payloads.extend(reader.feed(piece))
    except ProtocolError as error:
        assert "was announced, the limit is" in str(error)
    rejoined = b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)
    assert data.startswith(rejoined)


@pytest.mark.parametrize("size", [MAX_FRAME + 1, 2**32 - 1])
def test_an_impossible_length_is_refused_before_its_bytes_come(size: int) -> None:
    reader = FrameReader()
    frames = reader.feed(STOP + size.to_bytes(4, "big"))
    assert next(frames) == STOP[4:]
    with pytest.raises(
        ProtocolError, match=f"^a frame of {size} bytes was announced, the limit is {MAX_FRAME}$"
    ):
        next(frames)


def test_the_longest_frame_is_not_refused() -> None:
    assert list(FrameReader().feed(MAX_FRAME.to_bytes(4, "big"))) == []


@pytest.mark.parametrize("decode", [decode_to_worker, decode_to_router])
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        b"\x80",
        b"\x81\xa4type\xa5other",
        STOP[4:] + b"\x00",
        b"\xff" * 9,
        b"\x82\xa4type\xa5hello\xa4code\x91" + b"\x91" * 100_000,
    ],
    ids=["empty", "nil", "untagged", "unknown tag", "trailing byte", "no type", "bottomless"],
)
def test_what_is_not_a_message_is_a_protocol_error(decode: Callable[[bytes], object], payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(ProtocolError, match="'stop'"):
        decode_to_router(STOP[4:])
    with pytest.raises(ProtocolError, match="'failure'"):
        decode_to_worker(encode(Failure("EngineError", "x", ""))[4:])


def test_an_expression_without_bottom_is_refused() -> None:
    """``when`` is any plain data: even that must not exhaust the stack."""
    deep = b"\x91" * 100_000 + b"\xc0"
    rules = b"\x82\xa4type\xa5hello\xa5rules\x91\x92" + deep + b"\x01"
    with pytest.raises(ProtocolError):
        decode_to_worker(rules)


def test_settings_that_are_out_of_range_are_refused_as_part_of_the_frame() -> None:
    payload = encode(Step(1, [], [Open(1, 0, 1, 0, SamplingParams(top_p=0.5), ())], [], []))[4:]
    broken = payload.replace(b"\xcb\x3f\xe0", b"\xcb\xbf\xe0")
    assert broken != payload
    with pytest.raises(ProtocolError, match=r"top_p must be between 0 and 1, got -0\.5"):
        decode_to_worker(broken)
