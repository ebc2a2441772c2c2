"""The routers of a module share a nursery: each would otherwise import torch for itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tokenflow.actors.nursery import Nursery


class Lent(Nursery):
    """A nursery that outlives the routers that use it."""

    async def stop(self) -> None:
        """It is stopped by whom it belongs to."""


@pytest.fixture(scope="module")
async def nursery() -> AsyncIterator[Nursery]:
    lent = Lent()
    await lent.warm_up()
    yield lent
    await Nursery.stop(lent)


@pytest.fixture(autouse=True)
def one_nursery(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.actors.system.Nursery", lambda: nursery)
