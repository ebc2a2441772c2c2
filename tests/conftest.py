"""The event loop of asynchronous tests, and the rule that no test leaves anything running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from tokenflow.actors.nursery import Nursery

_REAP_S = 2.0


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Plain asyncio; folders whose tests are cheap run each on several loops."""
    return "asyncio", {}


@pytest.fixture
async def event_loop() -> asyncio.AbstractEventLoop:
    """The loop that an asynchronous test runs on."""
    return asyncio.get_running_loop()


@pytest.fixture(autouse=True)
def nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a task or a child process behind."""
    asynchronous = "anyio_backend" in request.fixturenames
    loop = request.getfixturevalue("event_loop") if asynchronous else None
    tasks_before, children_before = _tasks(loop), _children()
    yield
    tasks = {task.get_name() for task in _tasks(loop) - tasks_before}
    left = _children() - children_before
    if left:
        _, left = map(set, psutil.wait_procs(left, timeout=_REAP_S))
    children = {process.pid: _command(process) for process in left}
    for process in left:
        process.kill()
    assert not tasks, f"tasks left behind: {tasks}"
    assert not children, f"child processes left behind: {children}"


@pytest.fixture(autouse=True)
def nothing_to_complain_about() -> Iterator[None]:
    """Fail a test in which asyncio reports an error: a task destroyed, an exception that nobody saw."""
    complaints: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not complaints, f"asyncio complains: {complaints}"


class Lent(Nursery):
    """A nursery that outlives the routers that use it."""

    async def stop(self) -> None:
        """It is stopped by whom it belongs to."""


@pytest.fixture(scope="module")
async def nursery() -> AsyncIterator[Nursery]:
    """One for all tests of a module that ask for it: each would otherwise import torch for itself."""
    lent = Lent()
    await lent.warm_up()
    yield lent
    await Nursery.stop(lent)


@pytest.fixture
def shared_nursery(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> Nursery:
    """The routers of a test get their workers from the module's nursery."""
    monkeypatch.setattr("tokenflow.actors.system.Nursery", lambda: nursery)
    return nursery


def _tasks(loop: asyncio.AbstractEventLoop | None) -> set[asyncio.Task[object]]:
    return asyncio.all_tasks(loop) if loop is not None else set()


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "gone"
