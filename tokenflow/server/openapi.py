"""GET /openapi.json: the requests that the server takes, from the types that check them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenflow.server.requests import Chat, Completions, Detokenize, Generate, Tokenize
from tokenflow.server.transport import Json

_BODIES = {
    "/v1/completions": Completions,
    "/v1/chat/completions": Chat,
    "/generate": Generate,
    "/tokenize": Tokenize,
    "/detokenize": Detokenize,
}
_PAGES = {
    "/v1/models": "the recipe, and each of its models alone",
    "/health": "whether the server serves",
    "/ready": "whether it takes another request",
    "/health_generate": "whether it writes tokens",
    "/metrics": "metrics for Prometheus",
    "/version": "the version of tokenflow",
    "/tokenizer_info": "the tokenizer's configuration",
    "/model_info": "where the tokenizer is found",
    "/server_info": "the recipe's models and what they are doing",
}


async def openapi(request: Request) -> Response:
    """The document."""
    return Json(document())


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document of the server."""
    schemas, components = msgspec.json.schema_components(
        tuple(_BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for (path, shape), schema in zip(_BODIES.items(), schemas, strict=True):
        paths[path] = {
            "post": {
                "summary": (shape.__doc__ or "").strip(),
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": _RESPONSES,
            }
        }
    for path, summary in _PAGES.items():
        paths[path] = {"get": {"summary": summary, "responses": _RESPONSES}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"] = {
        "get": {"summary": "one of them", "parameters": [name], "responses": _RESPONSES}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokenflow", "version": version("tokenflow")},
        "paths": paths,
        "components": {"schemas": components},
    }


_RESPONSES = {
    "200": {"description": "the answer"},
    "default": {"description": "an error: {error: {message, type, param, code}}"},
}
