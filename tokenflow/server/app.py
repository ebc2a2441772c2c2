"""The server's application: its endpoints, and what errors become."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenflow.errors import TokenflowError
from tokenflow.server import catalogue, chat, completions, health, native, tokens
from tokenflow.server.errors import ApiError, no_route
from tokenflow.server.gateway import Gateway
from tokenflow.server.openapi import openapi
from tokenflow.server.records import service_of
from tokenflow.server.service import Service
from tokenflow.server.transport import ClientGone, failed

_NAMES = {"/v1/completions": completions.NAMES, "/v1/chat/completions": chat.NAMES, "/generate": native.NAMES}

ROUTES = [
    Route("/v1/models", catalogue.models),
    Route("/v1/models/{name:path}", catalogue.model),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/chat/completions", chat.chat, methods=["POST"]),
    Route("/health", health.health),
    Route("/ping", health.health, methods=["GET", "POST"]),
    Route("/ready", health.ready),
    Route("/health_generate", health.health_generate),
    Route("/metrics", health.metrics),
    Route("/metrics/", health.metrics),
    Route("/version", health.version),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokens.tokenizer_info),
    Route("/generate", native.generate, methods=["POST", "PUT"]),
    Route("/model_info", native.model_info),
    Route("/get_model_info", native.model_info),
    Route("/server_info", native.server_info),
    Route("/get_server_info", native.server_info),
    Route("/openapi.json", openapi),
]


def create_app(service: Service) -> Starlette:
    """The application of a service."""
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(Gateway, service=service)],
        exception_handlers={
            ApiError: _refused,
            TokenflowError: _refused,
            ClientGone: _gone,
            HTTPException: _no_route,
            Exception: _refused,
        },
    )
    app.state.service = service
    return app


async def _refused(request: Request, error: Exception) -> Response:
    return failed(service_of(request).error(error, _NAMES.get(request.url.path)))


async def _gone(request: Request, error: Exception) -> Response:
    service_of(request).metrics.aborted()
    return Response(status_code=499)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = no_route(error.status_code, request.method, request.url.path)
    return failed(told)
