"""Servers on loopback: in this process over toy models, or as a process of its own over the demo pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from tests.recipes import toy_pair
from tests.server.client import Client
from tests.threads import ThreadNursery
from tokenflow.dsl.ir import RecipeIR
from tokenflow.server.files import Connections
from tokenflow.server.serve import http_server
from tokenflow.server.service import Service, State
from tokenflow.wire.messages import Step, StepDone


class Served(Client):
    """A server of this process, and what it shares."""

    def __init__(self, sock: socket.socket, service: Service) -> None:
        super().__init__(sock.getsockname()[1])
        self.service = service
        self.stopped = anyio.Event()
        self._socket = sock
        self._server = http_server(service, Connections(4096))
        self._news = asyncio.Event()

    async def listen(self) -> None:
        """Serve until :meth:`stop`."""
        await self._server.serve([self._socket])
        self.stopped.set()

    def stop(self) -> None:
        """End as a server does after its drain."""
        self.service.state = State.DRAINING
        self._server.should_exit = True

    def watch(self) -> None:
        """Notice every step of a worker, and the end of every request."""
        observe, leave = self.service.metrics.step, self.service.leave
        loop = asyncio.get_running_loop()

        def step(model: str, step: Step, done: StepDone) -> None:
            observe(model, step, done)
            loop.call_soon(self._news.set)

        def left() -> None:
            leave()
            self._news.set()

        self.service.router._observer = step
        self.service.leave = left  # type: ignore[method-assign]

    async def until(self, condition: Callable[[], bool], within_s: float = 20) -> None:
        """Wait until a condition holds that a step or the end of a request brings about."""
        async with asyncio.timeout(within_s):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def serving(recipe: RecipeIR, **options: Any) -> AsyncIterator[Served]:
    """A running server of a recipe."""
    service = Service(recipe, **options)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as sock:
        served = Served(sock, service)
        served.watch()
        async with anyio.create_task_group() as tasks, service.router:
            service.state = State.SERVING
            tasks.start_soon(served.listen)
            try:
                yield served
            finally:
                served.stop()
                # A test that fails must not leave a listening socket to the loop.
                with anyio.CancelScope(shield=True):
                    await served.stopped.wait()


def mortal(recipe: RecipeIR) -> RecipeIR:
    """The recipe with models whose workers are not replaced."""
    models = tuple(replace(model, config=replace(model.config, restarts=0)) for model in recipe.models)
    return replace(recipe, models=models)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, object]]:
    """The loop that ``tokenflow serve`` runs on."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session", autouse=True)
def worker_threads() -> Any:
    """The workers of these servers are threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenflow.actors.system.Nursery", ThreadNursery)
        yield


@pytest.fixture(scope="package")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A server of two toy models that hand over now and then; the large one scores prompts."""
    toys = toy_pair(tmp_path_factory.mktemp("pair"), llm={"vocab_size": 100})
    recipe = replace(toys, scorer="llm", params={"tau": 0.5})
    async with serving(recipe) as served:
        yield served
