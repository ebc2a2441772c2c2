"""The process that a worker runs in: how it is started, signalled and known to be gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio

from tokenflow.actors.fork import Owner
from tokenflow.settings import worker_environment

WORKER = (sys.executable, "-P", "-m", "tokenflow.worker")

_WAKE_S = 0.1


class Child:
    """A process that leads a group of its own; ``ended`` is to be called once when it is gone.

    It belongs to the process that has started it: to one that was forked from that, it does not run.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._owner = Owner()
        self._code: int | None = None
        self._exited = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def code(self) -> int | None:
        """Its exit code, minus a signal's number; None while it runs, and where nobody saw it."""
        return self._code

    @property
    def running(self) -> bool:
        """Whether its end is not known yet."""
        return self._owner.here and not self._exited.is_set()

    def ended(self, code: int | None) -> None:
        """It exited with ``code``, minus a signal's number, or in a way that nobody saw (None)."""
        if self.running:
            self._code = code
            self._exited.set()
            for callback in self._callbacks:
                callback()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once it is gone."""
        if self.running:
            self._callbacks.append(callback)
        else:
            callback()

    async def wait(self) -> int | None:
        """Its exit code, once it has one."""
        await self._exited.wait()
        return self._code

    def kill(self, number: signal.Signals) -> None:
        """Signal the process, unless it is gone."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self, number: signal.Signals) -> None:
        """Signal the process and whatever it has started, unless it is gone."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """While somebody waits for it: where it was stopped (SIGSTOP), it goes on."""
        loop = asyncio.get_running_loop()
        again: asyncio.Handle

        def wake() -> None:
            nonlocal again
            self.kill_group(signal.SIGCONT)
            again = loop.call_later(_WAKE_S, wake)

        again = loop.call_soon(wake)
        try:
            yield
        finally:
            again.cancel()


Launch = Callable[[int, int, int], Awaitable[Child]]
"""Starts a worker process, given its end of the channel, the file that its standard error goes to (both as
descriptors of this process), and how many CPU threads it may use; leaves nothing behind if it is
cancelled."""


async def spawn(channel: int, stderr: int, threads: int, command: Sequence[str] = WORKER) -> Child:
    """Start ``command`` with two more arguments: the channel's descriptor, and this process's id."""
    # A process that is half started could not be ended.
    with anyio.CancelScope(shield=True):
        try:
            transport, protocol = await asyncio.get_running_loop().subprocess_exec(
                _Exit,
                *command,
                str(channel),
                str(os.getpid()),
                pass_fds=(channel,),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=stderr,
                start_new_session=True,
                env=worker_environment(threads),
            )
        except (FileNotFoundError, PermissionError) as error:
            # Not every event loop's error names the program.
            raise OSError(error.errno, error.strerror, error.filename or command[0]) from None
    return protocol.child(transport)


class _Exit(asyncio.SubprocessProtocol):
    """Waits for the end of a process."""

    def __init__(self) -> None:
        self._exited = False
        self._child: Child | None = None
        self._transport: asyncio.SubprocessTransport | None = None

    def child(self, transport: asyncio.SubprocessTransport) -> Child:
        """The process, which may be gone by now."""
        self._transport = transport
        self._child = Child(transport.get_pid())
        if self._exited:
            self.process_exited()
        return self._child

    def process_exited(self) -> None:
        self._exited = True
        if self._child is not None and self._transport is not None:
            self._child.ended(self._transport.get_returncode())
            self._transport.close()
