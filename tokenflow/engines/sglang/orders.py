"""What the first rank of a model tells the others; they carry out the same orders in the same order.

Ranks run in lock step: each order is one call on every rank, and what the ranks say to each other inside it
is SGLang's own business.  Everything is plain data: the first rank keeps the books, decides where every
token lies and samples; a sampled token reaches the others as an id of a later :class:`Run`.
"""

from __future__ import annotations

import socket

import msgspec

from tokenflow.types import ModelConfig
from tokenflow.wire.channel import FrameReader


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load rank ``rank`` of the model; ranks meet at ``port`` of this machine."""

    config: ModelConfig
    rank: int
    port: int
    cuda_graphs: bool
    load_format: str


class Map(msgspec.Struct, frozen=True, tag="map"):
    """The tokens of table row ``row`` from position ``start`` on lie at ``places`` of the KV cache."""

    row: int
    start: int
    places: list[int]


class Run(msgspec.Struct, frozen=True, tag="run"):
    """One forward pass over some rows.

    :param starts: how many tokens each row holds.
    :param counts: how many of ``ids`` each row is fed, in order.
    :param places: where their keys and values go.
    :param wanted: indices of the fed tokens whose logits are wanted; ``None`` for the last of each row.
    """

    rows: list[int]
    starts: list[int]
    counts: list[int]
    ids: list[int]
    places: list[int]
    wanted: list[int] | None


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """Copy keys and values between places of the KV cache."""

    source: list[int]
    target: list[int]


class SetAside(msgspec.Struct, frozen=True, tag="set_aside"):
    """Take the keys and values at ``places`` out of the way, until :class:`PutBack`."""

    places: list[int]


class PutBack(msgspec.Struct, frozen=True, tag="put_back"):
    """Undo :class:`SetAside`."""


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """Gather the input embeddings."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Finish and exit."""


Order = Load | Map | Run | Copy | SetAside | PutBack | Embed | Leave

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Order)
_READ = 1 << 16


def encode(order: Order) -> bytes:
    """One frame, as on the channel between router and worker."""
    payload = _encoder.encode(order)
    return len(payload).to_bytes(4, "big") + payload


class Inbox:
    """Orders as they come in on a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()
        self._payloads: list[bytes] = []

    def receive(self) -> Order:
        """Wait for the next order; :raises EOFError: if the first rank is gone."""
        while not self._payloads:
            if not (data := self._socket.recv(_READ)):
                raise EOFError
            self._payloads.extend(self._reader.feed(data))
        return _decoder.decode(self._payloads.pop(0))
