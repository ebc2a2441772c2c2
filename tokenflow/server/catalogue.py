"""GET /v1/models: the recipe by its names, and each of its models alone."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response as Answer

from tokenflow.server.records import service_of
from tokenflow.server.service import Service, Target
from tokenflow.server.transport import Json


async def models(request: Request) -> Answer:
    """Everybody who answers."""
    service = service_of(request)
    return Json({"object": "list", "data": [_card(service, target) for target in service.targets]})


async def model(request: Request) -> Answer:
    """One of them."""
    service = service_of(request)
    return Json(_card(service, service.target(request.path_params["name"])))


def _card(service: Service, target: Target) -> dict[str, Any]:
    simulated = {"tokenflow": {"simulated": True}} if service.router.recipe.simulated else {}
    return {
        "id": target.name,
        "object": "model",
        "created": service.created,
        "owned_by": "tokenflow",
        "root": service.root_of(target.member),
        "parent": None,
        "max_model_len": service.longest,
        **simulated,
    }
