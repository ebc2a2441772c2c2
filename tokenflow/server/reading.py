"""From the bytes of a request to what it asks."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request

from tokenflow.server.records import service_of
from tokenflow.server.requests import decode
from tokenflow.server.transport import LARGEST_BODY, read_body

T = TypeVar("T", bound=Struct)

_LARGE = 2**15
"""Bytes of a body that are read in a fraction of a millisecond."""


async def read(request: Request, shape: type[T], limit: int = LARGEST_BODY) -> T:
    """What a request asks.

    :param limit: most bytes of its body.
    :raises ApiError: if the body is too large, does not come, or is not what it should be.
    :raises ClientGone: if the client leaves before all of it is there.
    """
    service = service_of(request)
    with service.reading():
        body = await read_body(request, limit)
    work = partial(decode, body, shape)
    return work() if len(body) < _LARGE else await service.aside(work)
