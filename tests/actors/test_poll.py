"""The event loop stays awake as long as it is wanted, and no longer."""

from __future__ import annotations

import anyio
import pytest

from tokenflow.actors.poll import Poller

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_it_polls_until_nothing_is_wanted() -> None:
    asked: list[bool] = []

    def wanted() -> bool:
        asked.append(len(asked) < 20)
        return asked[-1]

    poller = Poller(wanted)
    poller.start()
    poller.start()
    await anyio.sleep(0.05)
    assert asked == [True] * 20 + [False]
    poller.start()
    await anyio.sleep(0.01)
    assert len(asked) == 22
