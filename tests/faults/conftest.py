"""Workers of these tests are processes: the routers of a module share a nursery."""

from __future__ import annotations

import pytest

from tokenflow.actors.nursery import Nursery


@pytest.fixture(autouse=True)
def one_nursery(shared_nursery: Nursery) -> None:
    """All of them; a module may say otherwise."""
