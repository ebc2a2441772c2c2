"""The server's application: its endpoints."""

from __future__ import annotations

from starlette.routing import Route, Router

from tokenflow.server import catalogue, chat, completions, health, native, tokens
from tokenflow.server.gateway import Gateway
from tokenflow.server.openapi import openapi
from tokenflow.server.service import Service

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


def create_app(service: Service) -> Gateway:
    """The ASGI application of a service."""
    return Gateway(Router(ROUTES, redirect_slashes=False), service)
