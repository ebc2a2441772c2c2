"""What happens to every request before and after its endpoint: its id, its key, its place in the log."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenflow.server.errors import INTERNAL, ApiError, no_route, wrong_key
from tokenflow.server.records import Record, new_record
from tokenflow.server.service import Service
from tokenflow.server.transport import ClientGone, failed

GENERATING = frozenset(("/v1/completions", "/v1/chat/completions", "/generate"))
"""Endpoints that make tokens."""

access = logging.getLogger("tokenflow.access")
log = logging.getLogger("tokenflow.server")


class Gateway:
    """The way into an application, and the way out for its errors."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.service = service
        self._app = app
        self._keys = [_digest(key) for key in service.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, got {scope['type']!r}")
        scope["app"] = self
        record = new_record(scope)

        def begin(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(raw=message["headers"])["x-request-id"] = record.id
            return send(message)

        generating = scope["path"] in GENERATING
        if generating:
            self.service.enter()
        try:
            self._admit(scope, generating)
            await self._app(scope, receive, begin)
        except ClientGone:
            self.service.metrics.aborted()
        except Exception as error:
            told = self._told(scope, error)
            if record.status:
                raise
            await failed(told)(scope, receive, begin)
        finally:
            if generating:
                self.service.leave()
            if self.service.access_log:
                access.info(_line(scope, record))

    def _told(self, scope: Scope, error: Exception) -> ApiError:
        if isinstance(error, HTTPException):
            error = no_route(error.status_code, scope["method"], scope["path"], error.headers or {})
        told = self.service.error(error)
        if told.code == INTERNAL:
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
        return told

    def _admit(self, scope: Scope, generating: bool) -> None:
        """Refuse early what need not be read."""
        if self._keys and (generating or scope["path"].startswith("/v1")):
            self._check_key(scope)
        if generating:
            self.service.require_serving()
            self.service.require_room()

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
