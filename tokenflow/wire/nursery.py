"""The messages between the router process and the nursery, which forks worker processes.

One message is one packet.  The descriptors of a :class:`Fork` travel with it: the worker's end of its
channel, and where its standard error goes.
"""

from __future__ import annotations

import msgspec

from tokenflow.errors import ProtocolError


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Router to nursery: start a worker that may use so many CPU ``threads``."""

    threads: int


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """Nursery to router, first packet: everything is imported."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """Nursery to router, in the order of the requests: a worker's process id, or 0 and the ``error``."""

    pid: int
    error: str = ""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """Nursery to router: a worker ended with this exit code, minus a signal's number."""

    pid: int
    code: int


FromNursery = Warm | Forked | Exited

MAX_PACKET = 4096

encode = msgspec.msgpack.Encoder().encode
_fork = msgspec.msgpack.Decoder(Fork)
_from_nursery = msgspec.msgpack.Decoder(FromNursery)


def decode_fork(packet: bytes) -> Fork:
    """Read a message of the router."""
    return _fork.decode(packet)


def decode_from_nursery(packet: bytes) -> FromNursery:
    """Read a message of the nursery; :raises ProtocolError: if it is not one."""
    try:
        return _from_nursery.decode(packet)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a packet of {len(packet)} bytes is not a message: {error}") from None
