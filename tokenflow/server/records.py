"""What is noted of one HTTP request from its beginning to its end."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request
from starlette.types import Scope

from tokenflow.server.service import Service
from tokenflow.types import Completion

_ID = re.compile(r"[!-~]{1,128}")
_KEY = "tokenflow.record"


@dataclass(slots=True)
class Record:
    """One request: when it came, and what it got.  Its id is what clients know it by, nothing more."""

    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    completions: Sequence[Completion] = ()

    def rename(self, name: str | None) -> None:
        """Take the id that the body gives, if it is one."""
        if name is not None and _ID.fullmatch(name):
            self.id = name


def new_record(scope: Scope) -> Record:
    """Begin the record of a request, under the id that its header gives or one of ours."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    record = Record(given if _ID.fullmatch(given) else secrets.token_hex(16))
    scope[_KEY] = record
    return record


def record_of(request: Request) -> Record:
    """The record of a request."""
    return cast(Record, request.scope[_KEY])


def service_of(request: Request) -> Service:
    """What the request's server shares."""
    return cast(Service, request.app.service)
