"""What happens to every request before and after its endpoint: its id, its key, its place in the log."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenflow.server.errors import ApiError, wrong_key
from tokenflow.server.records import Record, new_record
from tokenflow.server.service import Service
from tokenflow.server.transport import failed

GENERATING = frozenset(("/v1/completions", "/v1/chat/completions", "/generate"))
"""Endpoints that make tokens."""

access = logging.getLogger("tokenflow.access")


class Gateway:
    """Wraps an application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [_digest(key) for key in service.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = new_record(scope)

        async def begin(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(raw=message["headers"])["x-request-id"] = record.id
            await send(message)

        generating = scope["path"] in GENERATING and scope["method"] == "POST"
        if generating:
            self._service.enter()
        try:
            self._admit(scope, generating)
            await self._app(scope, receive, begin)
        except ApiError as error:
            await failed(error)(scope, receive, begin)
        finally:
            if generating:
                self._service.leave()
            if self._service.access_log:
                access.info(_line(scope, record))

    def _admit(self, scope: Scope, generating: bool) -> None:
        """Refuse early what need not be read."""
        if self._keys and (generating or scope["path"].startswith("/v1")):
            self._check_key(scope)
        if generating:
            self._service.require_serving()
            self._service.require_room()

    def _check_key(self, scope: Scope) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        digest = _digest(token.strip() if scheme.lower() == b"bearer" else given)
        # All of them are compared, so that the time tells nothing.
        if not sum(hmac.compare_digest(digest, key) for key in self._keys):
            raise wrong_key()


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def _line(scope: Scope, record: Record) -> str:
    """A request in one line of JSON."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": record.id,
        "client": scope["client"][0] if scope["client"] else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": record.status,
        "seconds": round(time.monotonic() - record.started, 6),
    }
    if record.completions:
        usages = [completion.usage for completion in record.completions]
        line["prompt_tokens"] = sum(usage.prompt_tokens for usage in usages)
        line["completion_tokens"] = sum(usage.completion_tokens for usage in usages)
        line["handoffs"] = sum(usage.handoffs for usage in usages)
        line["finish_reasons"] = [completion.finish_reason for completion in record.completions]
    return json.dumps(line)
