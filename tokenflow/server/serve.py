"""``tokenflow serve``: a recipe behind HTTP, from the first line of its log to the end of its last stream.

The server listens before the models load, so that its address is sure and whoever asks is told to wait.  The
first signal drains: what is open may end, what comes is refused.  The second, or the end of the drain
timeout, aborts what is open; clients are told either way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import replace
from functools import partial

import anyio
import uvicorn

from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.errors import RecipeError, TokenflowError
from tokenflow.eventloop import new_event_loop
from tokenflow.server.app import create_app
from tokenflow.server.files import Connections
from tokenflow.server.gateway import access
from tokenflow.server.listening import listening
from tokenflow.server.options import OptionError, Options, options
from tokenflow.server.protocol import Protocol
from tokenflow.server.service import Service, State
from tokenflow.server.transport import sole

_EXIT_OK, _EXIT_FAILURE, _EXIT_USAGE, _EXIT_INTERRUPT = 0, 1, 2, 130
_KEEP_ALIVE_S = 75
_DELAY_SAMPLE_S = 0.02
_FAREWELL_S = 3
"""What a client that does not read gets to take its last event."""


def serve(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code: 0 after a drain, 1 failure, 2 usage, 130 if it was cut short.

    :raises RecipeError: if the recipe is wrong.
    """
    try:
        chosen = options(args)
        _log(chosen)
        recipe = limited(load_recipe(args.recipe, args.overrides), chosen.max_model_len)
        connections = Connections.beside(len(recipe.models))
        with listening(chosen) as (sock, address), asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(recipe, chosen, connections, sock, address))
    except RecipeError:
        raise
    except OptionError as error:
        _say(str(error))
        return _EXIT_USAGE
    except (TokenflowError, OSError) as error:
        _say(str(error))
        return _EXIT_FAILURE


def limited(recipe: RecipeIR, max_model_len: int | None) -> RecipeIR:
    """The recipe with a context of at most ``max_model_len`` tokens for every model."""
    if max_model_len is None:
        return recipe
    models = tuple(
        replace(
            model,
            config=replace(
                model.config,
                context_length=min(max_model_len, model.config.context_length or max_model_len),
            ),
        )
        for model in recipe.models
    )
    return replace(recipe, models=models)


def http_server(service: Service, connections: Connections) -> uvicorn.Server:
    """The HTTP server of a service; ``serve(sockets=[...])`` runs it until its ``should_exit`` is set."""
    return _Server(
        uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            loop="none",
            http=partial(Protocol, connections, service.metrics.failed),  # type: ignore[arg-type]
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    )


async def _serve(
    recipe: RecipeIR, chosen: Options, connections: Connections, sock: socket.socket, address: str
) -> int:
    service = Service(
        recipe,
        names=chosen.served_model_name,
        api_keys=chosen.api_key,
        max_queued=chosen.max_queued_reqs,
        request_timeout=chosen.request_timeout,
        access_log=chosen.access_log,
    )
    server = http_server(service, connections)
    failure: TokenflowError | None = None
    code = _EXIT_FAILURE
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, [sock])
        try:
            code = await _live(service, chosen, address)
        except BaseExceptionGroup as group:
            error = sole(group)
            if not isinstance(error, TokenflowError):
                raise
            failure = error
        server.should_exit = True
    if failure is not None:
        raise failure
    return code


async def _live(service: Service, chosen: Options, address: str) -> int:
    """Load, serve until the first signal, drain; returns the exit code."""
    first, second = anyio.Event(), anyio.Event()
    recipe = service.router.recipe
    with _hearing() as signals, anyio.CancelScope() as loading:
        if changed := chosen.changed():
            _say(f"settings: {', '.join(f'{name} {value}' for name, value in changed.items())}")
        simulated = recipe.simulated
        members = ", ".join(
            f"{model.name} ({'simulated' if model.name in simulated else model.config.path})"
            for model in recipe.models
        )
        _say(f"{recipe.name}: loading {members}")
        started = time.monotonic()
        async with anyio.create_task_group() as tasks:

            def interrupt() -> None:
                if service.state is State.STARTING:
                    loading.cancel()

            tasks.start_soon(_hear, signals, first, second, interrupt)
            async with service.router:
                service.state = State.SERVING
                # What is there by now stays; no collection need look at it again.
                gc.collect()
                gc.freeze()
                _say(f"{recipe.name}: ready in {time.monotonic() - started:.1f} s at {address}")
                _say(f"try: {_example(service, address)}")
                tasks.start_soon(_watch_loop, service)
                await first.wait()
                service.state = State.DRAINING
                _say(f"draining: {service.open} open requests, {chosen.drain_timeout:g} s at most")
                await _drain(service, chosen.drain_timeout, second)
                service.stop_reading()
            tasks.cancel_scope.cancel()
    return (
        _EXIT_OK if first.is_set() and not second.is_set() and not loading.cancel_called else _EXIT_INTERRUPT
    )


@contextlib.contextmanager
def _hearing() -> Iterator[AsyncIterator[signal.Signals]]:
    """The signals that end a server, for as long as it lives; they do not cut the way out short."""
    endings = _endings()
    try:
        with anyio.open_signal_receiver(*endings) as signals:
            yield signals
    finally:
        for number in endings:
            signal.signal(number, signal.SIG_IGN)


async def _hear(
    signals: AsyncIterator[signal.Signals],
    first: anyio.Event,
    second: anyio.Event,
    interrupt: Callable[[], None],
) -> None:
    async for number in signals:
        # The end of a terminal is told by the kernel and by the shell: twice is not in a hurry.
        if not first.is_set():
            first.set()
            interrupt()
        elif number is not signal.SIGHUP:
            second.set()


def _endings() -> list[signal.Signals]:
    """Signals that end a server; that its terminal is gone does not, if it was started with nohup."""
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if deaf else [signal.SIGHUP])]


async def _watch_loop(service: Service) -> None:
    """Measure how late the event loop is."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _DELAY_SAMPLE_S
        await asyncio.sleep(_DELAY_SAMPLE_S)
        service.metrics.delayed(max(0.0, loop.time() - due))


async def _drain(service: Service, timeout_s: float, hurry: anyio.Event) -> None:
    """Wait until nothing is open, the timeout is over, or somebody is in a hurry."""
    with anyio.move_on_after(timeout_s):
        async with anyio.create_task_group() as tasks:

            async def hear() -> None:
                await hurry.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(hear)
            await service.until_idle()
            tasks.cancel_scope.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to us, and at its end those who do not leave."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hang_up)
            await super().shutdown(sockets)
            tasks.cancel_scope.cancel()

    async def _hang_up(self) -> None:
        # Their requests end by themselves then, as those of all who leave; uvicorn would cancel them.
        await anyio.sleep(_FAREWELL_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _log(chosen: Options) -> None:
    level = chosen.log_level.upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if chosen.access_log:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        access.addHandler(handler)
        access.setLevel(logging.INFO)
        access.propagate = False


def _example(service: Service, address: str) -> str:
    body = {"model": service.names[0], "prompt": "Q: 93*7=?\nA: ", "max_tokens": 100}
    key = " -H 'authorization: Bearer KEY'" if service.api_keys else ""
    return f"curl {address}/v1/completions{key} -d {shlex.quote(json.dumps(body))}"


def _say(text: str) -> None:
    # Clients do not suffer for a disk that is full, or a reader that is gone.
    with contextlib.suppress(OSError):
        print(f"tokenflow serve: {text}", file=sys.stderr, flush=True)
