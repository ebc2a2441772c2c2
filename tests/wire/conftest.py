"""Channels run on every event loop that tokenflow runs on."""

from __future__ import annotations

import pytest


@pytest.fixture(
    scope="session",
    params=[{"debug": True}, {"use_uvloop": True}],
    ids=["asyncio-debug", "uvloop"],
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    return "asyncio", request.param
