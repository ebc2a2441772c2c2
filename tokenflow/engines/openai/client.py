"""HTTP to an OpenAI-compatible endpoint: connections that are kept, streamed answers, errors by kind.

Blocking, and safe to use from several threads; every call has a connection of its own while it lasts.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from tokenflow.endpoints import parse_url
from tokenflow.errors import ModelLoadError
from tokenflow.types import EndpointConfig

_MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_SHOWN = 300


class CallFailed(Exception):
    """A call that got no answer, or a refusal.

    ``status`` is the HTTP status, 0 without one; ``may_pass`` whether another attempt makes sense, after
    ``pause_s`` seconds if the endpoint said so.
    """

    def __init__(self, message: str, *, status: int = 0, may_pass: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.may_pass = may_pass
        self.pause_s = pause_s


class Client:
    """The endpoint, reached with ``key`` if there is one.

    :raises ModelLoadError: if the endpoint's URL is none.
    """

    def __init__(self, endpoint: EndpointConfig, key: str | None) -> None:
        try:
            url = parse_url(endpoint.base_url)
        except ValueError as error:
            raise ModelLoadError(f"endpoint.base_url {error}") from None
        self.url = endpoint.base_url.rstrip("/")
        self._connect = HTTPSConnection if url.scheme == "https" else HTTPConnection
        # Without a port, a part of an IPv6 address would be taken for one.
        self._host, self._port = url.hostname or "", url.port or self._connect.default_port
        self._path = url.path.rstrip("/")
        self.timeout_s = endpoint.timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._idle: deque[HTTPConnection] = deque()

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at ``path``; :raises CallFailed: if there is none."""
        call = self._open("GET", path, None)
        try:
            return call.body()
        finally:
            call.close()

    def stream(self, path: str, body: dict[str, Any]) -> Call:
        """Post ``body`` and wait for the beginning of the answer; :raises CallFailed: if none comes."""
        return self._open("POST", path, json.dumps(body).encode())

    def close(self) -> None:
        """Drop all connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    def _open(self, method: str, path: str, body: bytes | None) -> Call:
        began = time.monotonic()
        while True:
            try:
                connection, fresh = self._idle.pop(), False
            except IndexError:
                connection = self._connect(self._host, self._port, timeout=self.timeout_s)
                fresh = True
            try:
                self._wait_until(connection.sock, began)
                connection.request(method, self._path + path, body, self._headers)
                sock = connection.sock
                self._wait_until(sock, began)
                response = connection.getresponse()
                break
            except (OSError, HTTPException) as error:
                connection.close()
                # One that was kept may have been closed by the other side meanwhile.
                if fresh or isinstance(error, TimeoutError):
                    raise CallFailed(self._trouble(error)) from error
        call = Call(response, connection, partial(self._wait_until, sock), began, self)
        if response.status != 200:
            try:
                raise self._refusal(response)
            finally:
                call.close()
        return call

    def _wait_until(self, sock: socket.socket | None, began: float) -> None:
        """Bound what a socket waits for, which began then; :raises TimeoutError: if its time is over."""
        left_s = began + self.timeout_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if sock is not None:
            sock.settimeout(left_s)

    def _trouble(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"{self.url} did not answer within {self.timeout_s:g} s"
        if isinstance(error, socket.gaierror):
            return f"{self.url}: there is no host {self._host!r}"
        return f"{self.url}: {type(error).__name__}: {error}"

    def _refusal(self, response: HTTPResponse) -> CallFailed:
        try:
            text = response.read(1 << 16).decode(errors="replace")
        except (OSError, HTTPException):
            text = ""
        status = response.status
        try:
            pause_s = max(0.0, float(response.headers.get("Retry-After", 0)))
        except ValueError:
            pause_s = 0.0
        return CallFailed(
            f"{self.url} answered {status}: {message_of(text)}",
            status=status,
            may_pass=status in _MAY_PASS,
            pause_s=pause_s,
        )


class Call:
    """An answer that is being received.

    :param wait_until: bounds a wait that began at some time.
    :param began: when the answer was asked for.
    """

    def __init__(
        self,
        response: HTTPResponse,
        connection: HTTPConnection,
        wait_until: Callable[[float], None],
        began: float,
        client: Client,
    ) -> None:
        self._response = response
        self._connection = connection
        self._wait_until = wait_until
        self._began = began
        self._client = client
        self._events = self._read()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The answer's JSON objects: events of a stream, or the whole as one.

        :raises CallFailed: if it breaks off, is no JSON, or says that something failed.
        """
        return self._events

    def body(self) -> dict[str, Any]:
        """The whole answer; :raises CallFailed: as above."""
        for event in self:
            return event
        raise CallFailed(f"{self._client.url} answered with nothing")

    def close(self) -> None:
        """Hang up, which makes a good endpoint stop; a connection whose answer is complete is kept."""
        if self._response.isclosed() and self._response.getheader("Connection", "").lower() != "close":
            self._client._idle.append(self._connection)
        else:
            self._connection.close()
        self._response.close()

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            asked = self._began
            self._wait_until(asked)
            if "event-stream" not in self._response.getheader("Content-Type", ""):
                yield self._parse(self._response.read())
                return
            done = False
            while line := self._response.readline():
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                done |= data == b"[DONE]"
                if data and not done:
                    yield self._parse(data)
                    asked = time.monotonic()
                if not done:
                    # A sign of life, as some send while a request queues, is no answer.
                    self._wait_until(asked)
            if not done:
                raise CallFailed(f"the answer of {self._client.url} broke off")
        except (OSError, HTTPException) as error:
            raise CallFailed(self._client._trouble(error)) from error

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            shown = " ".join(data[:_SHOWN].decode(errors="replace").split())
            raise CallFailed(f"{self._client.url} sent no JSON object: {shown}", may_pass=False)
        if event.get("error"):
            raise CallFailed(f"{self._client.url} failed: {message_of(json.dumps(event))}")
        return event


def message_of(text: str) -> str:
    """The message inside an error body, in whichever of the usual forms; else the beginning of the body.

    In one line: a gateway's error page has many.
    """
    try:
        body = json.loads(text)
        error = body.get("error", body)
        found = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError, RecursionError):
        found = None
    return " ".join(str(found or text).split())[:_SHOWN] or "no reason given"
