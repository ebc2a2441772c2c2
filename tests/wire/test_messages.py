"""The bytes on the wire, pinned: a router and a worker of different builds must understand each other.

A test here fails when the meaning of a frame changes.  If that is wanted, follow the four rules of
:mod:`tokenflow.wire.messages` (a new field comes last and has a default), raise ``VERSION`` if an old peer
would misread the message, and pin the new bytes.
"""

from __future__ import annotations

import typing

import msgspec
import pytest

from tokenflow.types import ModelConfig, SamplingParams
from tokenflow.wire.channel import decode_to_router, decode_to_worker, encode
from tokenflow.wire.messages import (
    VERSION,
    Claim,
    DeviceShare,
    Failure,
    Grant,
    Hello,
    Hold,
    Open,
    Ready,
    RouteRule,
    Row,
    RowDone,
    RowFailed,
    Score,
    Scored,
    Step,
    StepDone,
    Stop,
    ToRouter,
    ToWorker,
)

SAMPLING = SamplingParams(
    max_tokens=300,
    temperature=0.5,
    top_k=40,
    top_p=0.875,
    min_p=0.125,
    seed=2**64 - 1,
    choice=2,
    repetition_penalty=1.25,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    logit_bias={70_000: -2.5},
    min_tokens=3,
    stop=("\n\n", "ÿ"),
    stop_token_ids=(7,),
    ignore_eos=True,
    logprobs=True,
    top_logprobs=5,
)
TO_WORKER: list[tuple[ToWorker, str]] = [
    (
        Hello(
            VERSION,
            "slm",
            1,
            ModelConfig(path="/models/slm", kv_cache=4096),
            (RouteRule(["gt", ["signal", "entropy"], ["param", "tau"]], 2),),
            ("tau",),
            151_669,
            (0, 151_645),
        ),
        "8da474797065a568656c6c6fa776657273696f6e03a56d6f64656ca3736c6da4636f646501a6636f6e666967de0013a4"
        "70617468ab2f6d6f64656c732f736c6da6656e67696e65a5746f726368a56474797065a46175746fa6646576696365a4"
        "6175746fae636f6e746578745f6c656e677468c0a86b765f6361636865cd1000ac6d61785f726571756573747340b06d"
        "61785f62617463685f746f6b656e73cd0800ac7072656669785f6361636865c3a77468726561647301af74656e736f72"
        "5f706172616c6c656c01a6766572696679c2a8656e64706f696e74c0aa6c6174656e63795f6d7390a7726f7574696e67"
        "80a57472616365a0ac6c6f61645f74696d656f7574cb409c200000000000ac737465705f74696d656f7574cb405e0000"
        "00000000a8726573746172747305a572756c6573919293a2677492a67369676e616ca7656e74726f707992a570617261"
        "6da374617502a6706172616d7391a3746175ab766f6361625f6c696d6974ce00025075ad656f735f746f6b656e5f6964"
        "739200ce0002505da5686561647390a6707974686f6ec0a66d6f64656c7301ac64657374696e6174696f6e7390",
    ),
    (
        Step(
            7,
            [3],
            [Open(4, 1, 2, 99, SAMPLING, (0.03125,))],
            [(5, 12)],
            [Row(4, 1, 0, [11, 70_000], 0, 0, 32), Row(5, 0, 12, [13], 6)],
            2,
        ),
        "87a474797065a473746570a2696407a464726f709103a46f70656e919704010263de0012aa6d61785f746f6b656e73cd"
        "012cab74656d7065726174757265cb3fe0000000000000a5746f705f6b28a5746f705f70cb3fec000000000000a56d69"
        "6e5f70cb3fc0000000000000a473656564cfffffffffffffffffa663686f69636502b272657065746974696f6e5f7065"
        "6e616c7479cb3ff4000000000000b070726573656e63655f70656e616c7479cbbfe0000000000000b16672657175656e"
        "63795f70656e616c7479cb3fe0000000000000aa6c6f6769745f6269617381ce00011170cbc004000000000000aa6d69"
        "6e5f746f6b656e7303a473746f7092a20a0aa2c3bfae73746f705f746f6b656e5f6964739107aa69676e6f72655f656f"
        "73c3a86c6f6770726f6273c3ac746f705f6c6f6770726f627305b3736b69705f7370656369616c5f746f6b656e73c391"
        "cb3fa000000000000090a87472756e636174659192050ca4726f77739297040100920bce000111700000209705000c91"
        "0d060000a56c6561737402",
    ),
    (Score(8, [1, 2, 300], 2), "84a474797065a573636f7265a2696408a6746f6b656e73930102cd012ca3746f7002"),
    (Grant(4096), "82a474797065a56772616e74a86b765f6361636865cd1000"),
    (Hold(), "81a474797065a4686f6c64"),
    (Stop(), "81a474797065a473746f70"),
]
TO_ROUTER: list[tuple[ToRouter, str]] = [
    (
        Claim([DeviceShare("cuda:0", 2**36, 2**35, 2**33, 114_688)], 2_621_440),
        "83a474797065a5636c61696da67368617265739195a6637564613a30cf0000001000000000cf0000000800000000cf00"
        "00000200000000ce0001c000ab6d6f73745f746f6b656e73ce00280000",
    ),
    (
        Ready(VERSION, 151_936, 40_960, 65_536, 16, 64, "ab12", "cuda:0", "bfloat16", 2.5),
        "8ba474797065a57265616479a776657273696f6e03aa766f6361625f73697a65ce00025180ae636f6e746578745f6c65"
        "6e677468cda000ab6b765f6361706163697479ce00010000aa626c6f636b5f73697a6510ac6d61785f72657175657374"
        "7340a9746f6b656e697a6572a461623132a6646576696365a6637564613a30a56474797065a862666c6f61743136a66c"
        "6f61645f73cb4004000000000000",
    ),
    (
        StepDone(
            7,
            [RowDone(4, 1, 2, 70_000, 0, 2, -0.25, ((70_000, -0.25), (5, -2.0))), RowDone(5, 0, 13, -1)],
            [RowFailed(6, 0, 9, "NonFiniteLogits", "NaN")],
            10.0,
            10.5,
            0.375,
            3,
            16,
            [4],
        ),
        "8aa474797065a4646f6e65a2696407a4726f77739299040102ce000111700002cbbfd00000000000009292ce00011170"
        "cbbfd00000000000009205cbc000000000000000909905000dffff00c09090a66661696c65649195060009af4e6f6e46"
        "696e6974654c6f67697473a34e614ea773746172746564cb4024000000000000a5656e646564cb4025000000000000a9"
        "666f72776172645f73cb3fd8000000000000a8636f6d707574656403a663616368656410a561686561649104",
    ),
    (
        Scored(8, [-0.5, -1.5], [[(2, -0.5)], []]),
        "85a474797065a673636f726564a2696408a86c6f6770726f627392cbbfe0000000000000cbbff8000000000000a3746f"
        "7092919202cbbfe000000000000090a76661696c757265a0",
    ),
    (
        Failure("ModelNotFound", "no such directory", "Traceback"),
        "84a474797065a76661696c757265a46b696e64ad4d6f64656c4e6f74466f756e64a76d657373616765b16e6f20737563"
        "68206469726563746f7279a974726163656261636ba954726163656261636b",
    ),
]


@pytest.mark.parametrize(("message", "pinned"), TO_WORKER, ids=lambda value: type(value).__name__)
def test_frames_to_a_worker_are_the_bytes_they_always_were(message: ToWorker, pinned: str) -> None:
    assert encode(message)[4:].hex() == pinned
    assert decode_to_worker(bytes.fromhex(pinned)) == message


@pytest.mark.parametrize(("message", "pinned"), TO_ROUTER, ids=lambda value: type(value).__name__)
def test_frames_to_the_router_are_the_bytes_they_always_were(message: ToRouter, pinned: str) -> None:
    assert encode(message)[4:].hex() == pinned
    assert decode_to_router(bytes.fromhex(pinned)) == message


def test_every_message_is_pinned() -> None:
    assert {type(message) for message, _ in TO_WORKER} == set(typing.get_args(ToWorker))
    assert {type(message) for message, _ in TO_ROUTER} == set(typing.get_args(ToRouter))


def test_a_frame_starts_with_its_length_in_four_bytes_big_endian() -> None:
    assert encode(Stop()) == bytes.fromhex("0000000b81a474797065a473746f70")


def test_an_older_peer_reads_past_fields_that_it_does_not_know() -> None:
    row = msgspec.msgpack.encode([4, 1, 0, [11], 0, 0, 0, "a later field"])
    assert msgspec.msgpack.decode(row, type=Row) == Row(4, 1, 0, [11], 0)
    stop = msgspec.msgpack.encode({"type": "stop", "later": 1})
    assert decode_to_worker(stop) == Stop()


def test_a_newer_peer_reads_rows_without_the_fields_that_have_defaults() -> None:
    row = msgspec.msgpack.encode([4, 1, 2, 70])
    assert msgspec.msgpack.decode(row, type=RowDone) == RowDone(4, 1, 2, 70, -1, 0, None)


def test_an_expression_tree_of_tuples_arrives_as_lists() -> None:
    hello = Hello(VERSION, "m", 1, ModelConfig(path=""), (RouteRule(("not", ("x", 1.5)), 2),), (), 1, ())
    got = decode_to_worker(encode(hello)[4:])
    assert isinstance(got, Hello)
    assert got.rules == (RouteRule(["not", ["x", 1.5]], 2),)
