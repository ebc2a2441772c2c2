"""A worker process as its actor sees it: start, ask, stop, and the truth about its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import AsyncIterator

import anyio
from anyio.abc import TaskGroup

from tokenflow.errors import ProtocolError, TokenflowError, WorkerDied, rebuild
from tokenflow.settings import worker_environment
from tokenflow.wire.channel import Channel
from tokenflow.wire.messages import Failure, Hello, Ready, Step, StepDone, Stop, ToRouter

_STDERR_LINES = 20
_EXIT_GRACE_S = 1.0

log = logging.getLogger("tokenflow.worker")


class WorkerProcess:
    """One worker process and the channel to it.

    ``died`` is set, with ``error`` saying why, as soon as the process is gone without having been asked
    to go; every question that is open then gets that error.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.died = asyncio.Event()
        self.error: TokenflowError | None = None
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._step: asyncio.Future[StepDone] | None = None
        self._hung_up = asyncio.Event()
        self._reason: Exception | None = None
        self._failure: Failure | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._stderr_closed = asyncio.Event()
        self._stopping = False

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it was started."""
        return self._process.pid if self._process else 0

    async def start(self, tasks: TaskGroup) -> Ready:
        """Start the process and wait until its model is loaded.

        :raises ModelLoadError: if the model cannot be loaded.
        :raises WorkerDied: if the process ends before it is ready.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "tokenflow.worker",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                start_new_session=True,
                env=worker_environment(self.hello.config.threads),
            )
        tasks.start_soon(self._read_stderr)
        self._ready = asyncio.get_running_loop().create_future()
        self._channel = await Channel.connect(ours, self)
        tasks.start_soon(self._watch)
        self._channel.send(self.hello)
        return await self._ready

    def step(self, step: Step) -> asyncio.Future[StepDone]:
        """Send a step; the answer fails with :class:`WorkerDied` if the worker ends before it comes."""
        assert self._channel is not None
        self._step = asyncio.get_running_loop().create_future()
        if self.error is not None:
            self._step.set_exception(WorkerDied(str(self.error)))
        self._channel.send(step)
        return self._step

    async def stop(self, grace_s: float) -> None:
        """Ask the worker to finish; terminate and then kill it if it does not within ``grace_s`` each."""
        self._stopping = True
        if self._process is None or self._channel is None:
            self.kill()
            return
        self._channel.send(Stop())
        for last_resort in (signal.SIGTERM, signal.SIGKILL):
            with anyio.move_on_after(grace_s):
                await self._process.wait()
                break
            self._signal(last_resort)
        await self._process.wait()
        self._channel.close()

    def kill(self) -> None:
        """End the worker at once, without asking."""
        self._stopping = True
        self._signal(signal.SIGKILL)
        if self._channel is not None:
            self._channel.close()

    def received(self, message: ToRouter) -> None:
        """Part of :class:`tokenflow.wire.channel.Receiver`."""
        if isinstance(message, StepDone) and self._step is not None and not self._step.done():
            self._step.set_result(message)
        elif isinstance(message, Ready) and self._ready is not None and not self._ready.done():
            self._ready.set_result(message)
        elif isinstance(message, Failure):
            self._failure = message
        else:
            raise ProtocolError(f"unexpected {type(message).__name__} from {self._name}")

    def closed(self, error: Exception | None) -> None:
        """Part of :class:`tokenflow.wire.channel.Receiver`."""
        self._reason = error
        self._hung_up.set()

    @property
    def _name(self) -> str:
        return f"worker of model {self.hello.model!r} (pid {self.pid})"

    async def _watch(self) -> None:
        """Turn the end of the channel into one error, told to everybody who waits."""
        assert self._process is not None
        await self._hung_up.wait()
        with anyio.move_on_after(_EXIT_GRACE_S):
            await self._process.wait()
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        with anyio.move_on_after(_EXIT_GRACE_S):
            await self._stderr_closed.wait()
        self.error = self._explain(self._process.returncode or 0)
        if not self._stopping:
            self.died.set()
        for waiting in (self._ready, self._step):
            if waiting is not None and not waiting.done():
                waiting.set_exception(self.error)
                waiting.exception()

    def _explain(self, code: int) -> TokenflowError:
        if self._failure is not None:
            log.debug("%s failed:\n%s", self._name, self._failure.traceback)
            return rebuild(self._failure.kind, f"model {self.hello.model!r}: {self._failure.message}")
        cause = f"exit code {code}" if code >= 0 else f"signal {-code} ({_signal_name(-code)})"
        reason = f" after {self._reason}" if isinstance(self._reason, ProtocolError) else ""
        lines = "".join(f"\n  {line}" for line in self._stderr)
        tail = f"; its last words:{lines}" if lines else ""
        return WorkerDied(f"{self._name} ended with {cause}{reason}{tail}")

    async def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        async for line in _lines(self._process.stderr):
            self._stderr.append(line)
            log.warning("[%s] %s", self.hello.model, line)
        self._stderr_closed.set()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the reader's limit: what fits was dropped by asyncio
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
