"""Whether the server serves, what version it is, and its metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response as Answer

from tokenflow.server.metrics import CONTENT_TYPE
from tokenflow.server.records import service_of
from tokenflow.server.transport import Json, unless_gone


async def health(request: Request) -> Answer:
    """GET /health: 200 and nothing while the server serves, else 503 and why not."""
    service_of(request).require_serving()
    return Answer()


async def ready(request: Request) -> Answer:
    """GET /ready: 200 while another request would be taken."""
    service = service_of(request)
    service.require_serving()
    service.require_room()
    return Answer()


async def health_generate(request: Request) -> Answer:
    """GET /health_generate: 200 once a token was written."""
    service = service_of(request)
    service.require_serving()
    prompt = [service.router.tokenizer.bos_id or 0]
    await unless_gone(request.receive, lambda: service.router.generate(prompt, max_tokens=1))
    return Answer()


async def version(request: Request) -> Answer:
    """GET /version."""
    return Json({"version": service_of(request).version})


async def metrics(request: Request) -> Answer:
    """GET /metrics, in Prometheus's text format."""
    return Answer(service_of(request).exposition(), media_type=CONTENT_TYPE)
