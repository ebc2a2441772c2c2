"""Where these tests run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", help="device of the engines")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that the engines run on."""
    chosen: str = request.config.getoption("--device")
    return chosen
