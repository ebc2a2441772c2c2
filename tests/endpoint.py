"""A small OpenAI-compatible endpoint on loopback: speaks like one server or another, and fails on demand."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.recipes import DEMO
from tests.toy.engine import toy_logits

VOCAB, EOS = 128, 2
MODEL = "some/model"

Fault = Callable[["Handler"], bool]
"""Deals with a completion request in place of the endpoint; False leaves it to the endpoint."""


def status(code: int, message: str = "no", **headers: str) -> Fault:
    """Answer with an error."""

    def fault(handler: Handler) -> bool:
        handler.answer(code, {"error": {"message": message}}, headers)
        return True

    return fault


def hang_up(handler: Handler) -> bool:
    """Close the connection without an answer."""
    handler.close_connection = True
    return True


def broken_after(tokens: int) -> Fault:
    """Close the connection after so many tokens."""

    def fault(handler: Handler) -> bool:
        handler.server.endpoint.cut = tokens
        return False

    return fault


def held(until: Event) -> Fault:
    """Wait before answering."""

    def fault(handler: Handler) -> bool:
        until.wait(30)
        return False

    return fault


def said(body: object) -> Fault:
    """Answer with this object, as if it were a completion."""

    def fault(handler: Handler) -> bool:
        handler.answer(200, body)
        return True

    return fault


def pinging(handler: Handler) -> bool:
    """Show signs of life for ever, and no answer."""
    handler.begin()
    with contextlib.suppress(ConnectionError):
        while not Event().wait(0.02):
            handler.chunk(": ping\n\n")
    handler.close_connection = True
    return True


class Endpoint:
    """The endpoint; ``url`` is its base URL while the context lasts.

    :param speaks: ``ids`` (vLLM, tokenflow), ``sglang``, ``llama`` (llama-server), ``plain`` (texts only,
        unknown fields refused), ``silent`` (token ids, but no log-probabilities).
    :param logits: next-token logits [V] after some token ids.
    :param most: most alternatives that it lists.
    :param endless: write on, whatever ``max_tokens`` says.
    :ivar requests: bodies of all completion requests.
    :ivar faults: what happens to the next ones, first come first served.
    :ivar busiest: most completion requests that were open at once: neither answered nor hung up on.
    """

    def __init__(
        self,
        speaks: str = "ids",
        logits: Callable[[Sequence[int]], torch.Tensor] = lambda ids: toy_logits(list(ids), VOCAB),
        most: int = 20,
        key: str | None = None,
        endless: bool = False,
        card: Mapping[str, Any] | None = None,
        tokenizer: Path = DEMO / "small" / "tokenizer.json",
    ) -> None:
        self.speaks = speaks
        self.logits = logits
        self.most = most
        self.key = key
        self.card = {"id": MODEL, "object": "model", "max_model_len": 256} if card is None else card
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.faults: deque[Fault] = deque()
        self.cut: int | None = None
        self.endless = endless
        self.open: set[socket.socket] = set()
        self.busiest = 0
        self.lock = Lock()

    def __enter__(self) -> Endpoint:
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.endpoint = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def text_of(self, token: int) -> str:
        """A token as text."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def pieces(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Choices of the events that answer a request, a token each."""
        ids, cut = list(body["prompt"]), self.cut
        count = sys.maxsize if self.endless else body["max_tokens"]
        self.cut = None
        for index in range(count):
            if index == cut:
                raise ConnectionError
            logprobs = self.logits(ids).double().log_softmax(-1)
            token = int(logprobs.argmax())
            ends = token == EOS and not body.get("ignore_eos")
            ids.append(token)
            if ends and self.speaks in ("plain", "llama"):
                yield {"text": "", "finish_reason": "stop"}
                return
            finish = "stop" if ends else "length" if index == count - 1 else None
            yield {**self.piece(token, logprobs, body), "finish_reason": finish}
            if ends:
                return

    def piece(self, token: int, logprobs: torch.Tensor, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the endpoint says of one token."""
        count = min(body.get("logprobs") or 0, self.most)
        values, best = logprobs.topk(count)
        pairs = list(zip(best.tolist(), values.tolist(), strict=True))
        choice: dict[str, Any] = {"index": 0, "text": self.text_of(token), "logprobs": None}
        if self.speaks == "llama":
            entry = {"id": token, "token": self.text_of(token), "logprob": float(logprobs[token])}
            top = [{"id": i, "token": self.text_of(i), "logprob": value} for i, value in pairs]
            return {**choice, "logprobs": {"content": [{**entry, "top_logprobs": top}]} if count else None}
        if body.get("return_token_ids") and self.speaks in ("ids", "sglang", "silent"):
            choice["token_ids"] = [token]
        as_ids = body.get("return_tokens_as_token_ids") and self.speaks == "ids"

        def name(i: int) -> str:
            return f"token_id:{i}" if as_ids else self.text_of(i)

        if count and self.speaks != "silent":
            choice["logprobs"] = {
                "tokens": [name(token)],
                "token_logprobs": [float(logprobs[token])],
                "top_logprobs": [{name(i): value for i, value in pairs}],
            }
        return choice


def still_there(connection: socket.socket) -> bool:
    """Whether the other side of a connection has not closed it."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


class Server(ThreadingHTTPServer):
    """One thread per connection."""

    daemon_threads = True
    endpoint: Endpoint

    def get_request(self) -> Any:
        self.endpoint.connections += 1
        return super().get_request()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection, kept alive."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.known():
            self.answer(200, {"object": "list", "data": [self.server.endpoint.card]})

    def do_POST(self) -> None:
        endpoint = self.server.endpoint
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.known():
            return
        with endpoint.lock:
            endpoint.requests.append(body)
            endpoint.open.add(self.connection)
            endpoint.busiest = max(endpoint.busiest, sum(map(still_there, endpoint.open)))
            fault = endpoint.faults.popleft() if endpoint.faults else None
        try:
            if fault is None or not fault(self):
                self.complete(body)
        finally:
            with endpoint.lock:
                endpoint.open.discard(self.connection)

    def known(self) -> bool:
        """Whether the client has the key; one that has not is told so."""
        key = self.server.endpoint.key
        right = key is None or self.headers.get("Authorization") == f"Bearer {key}"
        if not right:
            self.answer(401, {"error": {"message": "wrong key"}})
        return right

    def complete(self, body: Mapping[str, Any]) -> None:
        known = {"model", "prompt", "max_tokens", "temperature", "stream", "logprobs"}
        if self.server.endpoint.speaks == "plain" and (unknown := body.keys() - known):
            self.answer(400, {"error": {"message": f"unrecognized arguments: {sorted(unknown)}"}})
            return
        self.begin()
        try:
            for choice in self.server.endpoint.pieces(body):
                self.chunk(f"data: {json.dumps({'choices': [choice]})}\n\n")
            self.chunk("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionError:
            self.close_connection = True

    def begin(self) -> None:
        """The head of a streamed answer."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(self, code: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)
