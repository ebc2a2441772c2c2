"""The server's application: its endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response as Answer
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from tokenflow.server import catalogue, chat, completions, health, native, tokens
from tokenflow.server.gateway import Gateway
from tokenflow.server.openapi import openapi
from tokenflow.server.service import Service


class Endpoint:
    """A function that answers requests; between it and the client is nothing that every token must pass."""

    def __init__(self, answer: Callable[[Request], Awaitable[Answer]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(Request(scope, receive, send))
        await answer(scope, receive, send)


def _route(
    path: str, answer: Callable[[Request], Awaitable[Answer]], methods: Sequence[str] = ("GET",)
) -> Route:
    return Route(path, Endpoint(answer), methods=methods)


ROUTES = [
    _route("/v1/models", catalogue.models),
    _route("/v1/models/", catalogue.models),
    _route("/v1/models/{name:path}", catalogue.model),
    _route("/v1/completions", completions.completions, ["POST"]),
    _route("/v1/chat/completions", chat.chat, ["POST"]),
    _route("/health", health.health),
    _route("/ping", health.health, ["GET", "POST"]),
    _route("/ready", health.ready),
    _route("/health_generate", health.health_generate),
    _route("/metrics", health.metrics),
    _route("/metrics/", health.metrics),
    _route("/version", health.version),
    _route("/tokenize", tokens.tokenize, ["POST"]),
    _route("/detokenize", tokens.detokenize, ["POST"]),
    _route("/tokenizer_info", tokens.tokenizer_info),
    _route("/generate", native.generate, ["POST", "PUT"]),
    _route("/model_info", native.model_info),
    _route("/get_model_info", native.model_info),
    _route("/server_info", native.server_info),
    _route("/get_server_info", native.server_info),
    _route("/openapi.json", openapi),
]


def create_app(service: Service) -> Gateway:
    """The ASGI application of a service."""
    return Gateway(Router(ROUTES, redirect_slashes=False), service)
