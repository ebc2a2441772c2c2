"""The one loop of a worker process: receive a message, do what it asks, reply.

It holds nothing that the router cannot rebuild, and it never blocks on anything but its channel and its
device.  What is behind it is a model that is run, or one that is simulated.
"""

from __future__ import annotations

import gc
import logging
import socket
import time
import traceback
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import msgspec

from tokenflow.errors import ProtocolError, TokenflowError
from tokenflow.settings import settings
from tokenflow.wire.ahead import next_step
from tokenflow.wire.channel import WorkerChannel, encode
from tokenflow.wire.messages import (
    VERSION,
    Claim,
    Failure,
    Grant,
    Hello,
    Hold,
    Ready,
    Scored,
    Step,
    StepDone,
    Stop,
    ToWorker,
)
from tokenflow.worker.ahead import Ahead

_EXIT_FAILURE = 1


class Worker(Protocol):
    """Who answers a router.

    ``awake_s`` is how long it polls for the next message before it sleeps: a device whose steps take
    milliseconds should not wait for its process to wake up.  ``mode`` is entered once, for all its steps: to
    enter it takes 10 us.
    """

    awake_s: float
    mode: AbstractContextManager[object]

    def ready(self, load_s: float) -> Ready:
        """The handshake's answer."""

    def run(self, step: Step) -> StepDone:
        """Run a step."""

    def wait(self) -> None:
        """Wait until the device is done with the step: what came of it may be sent."""

    def answer(self, message: ToWorker) -> Scored:
        """Do what any other message asks; :raises ProtocolError: if it has no place after the handshake."""

    def close(self) -> None:
        """Give device memory back; nothing is asked afterwards."""


def serve(sock: socket.socket) -> int:
    """Load the model the router asks for and run its steps; returns the exit code of the process."""
    logging.basicConfig(level=settings().log_level, format="%(levelname)s %(name)s: %(message)s")
    channel = WorkerChannel(sock)
    try:
        hello = channel.receive()
        if not isinstance(hello, Hello) or hello.version != VERSION:
            raise ProtocolError(f"this worker speaks version {VERSION}; the router opened with {hello!r:.80}")
        channel.send(_claim(hello))
        grant = channel.receive()
        if not isinstance(grant, Grant):
            raise ProtocolError(f"a worker is granted its memory before {type(grant).__name__}")
        config = replace(hello.config, kv_cache=grant.kv_cache)
        started = time.monotonic()
        worker = _load(msgspec.structs.replace(hello, config=config))
        # What is loaded by now lives as long as the worker; no collection need look at it again.
        gc.freeze()
        channel.send(worker.ready(time.monotonic() - started))
        ahead = Ahead(hello)
        with worker.mode:
            while not isinstance(message := channel.receive(worker.awake_s), Stop):
                if isinstance(message, Step):
                    _run(channel, worker, ahead, message)
                elif not isinstance(message, Hold):
                    channel.send(worker.answer(message))
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, TokenflowError) else "EngineError"
        text = str(error) if isinstance(error, TokenflowError) else f"{type(error).__name__}: {error}"
        channel.send(Failure(kind, text, traceback.format_exc()))
        return _EXIT_FAILURE
    worker.close()
    return 0


def _run(channel: WorkerChannel, worker: Worker, ahead: Ahead, step: Step) -> None:
    """Run a step, and those after it that the router leaves to this worker, until there is a message."""
    while True:
        done = worker.run(step)
        ahead.told(step)
        handles = ahead.handles(step, done)
        # What can be done before the device is done does not lengthen the cycle.
        if not handles:
            frame = encode(done)
            worker.wait()
            channel.send_frame(frame)
            return
        frame = encode(msgspec.structs.replace(done, ahead=handles))
        following = next_step(step, done, handles)
        worker.wait()
        if channel.waiting():
            channel.send(done)
            return
        channel.send_frame(frame)
        step = following


def _claim(hello: Hello) -> Claim:
    if hello.config.engine in ("sim", "openai"):
        return Claim([], 0)
    from tokenflow.engines.load import claim

    return claim(hello.config)


def _load(hello: Hello) -> Worker:
    if hello.config.engine == "sim":
        from tokenflow.engines.sim import SimWorker

        return SimWorker(hello)
    # torch takes a second to import, and a simulated model does without.
    from tokenflow.worker.model import ModelWorker

    return ModelWorker(hello)
