"""The workers of these tests are threads: they are about what recipes do, and start many routers."""

from __future__ import annotations

import pytest

from tests.reference.record import ALGORITHMS, R_STITCH, Recorded, load_traces
from tests.threads import ThreadNursery


@pytest.fixture(autouse=True)
def worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.actors.system.Nursery", ThreadNursery)


@pytest.fixture(scope="session")
def recorded() -> Recorded:
    """The reference's traces of every algorithm."""
    return load_traces(ALGORITHMS)


@pytest.fixture(scope="session")
def alone() -> Recorded:
    """The reference's traces of R-Stitch, from the large model alone (tau -1) to the small one (tau 1)."""
    return load_traces(R_STITCH)
