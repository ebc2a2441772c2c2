"""A worker process as its actor sees it: start, ask, stop, and the truth about its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import Sequence

import anyio
from anyio.abc import TaskGroup

from tokenflow.errors import ProtocolError, TokenflowError, WorkerDied, rebuild
from tokenflow.settings import worker_environment
from tokenflow.wire.channel import Channel
from tokenflow.wire.messages import Failure, Hello, Ready, Score, Scored, Step, StepDone, Stop, ToRouter

_COMMAND = (sys.executable, "-P", "-m", "tokenflow.worker")
_STDERR_LINES = 20
_LONGEST_LINE = 4096
_EXIT_GRACE_S = 1.0

log = logging.getLogger("tokenflow.worker")


class WorkerProcess(asyncio.SubprocessProtocol):
    """One worker process and the channel to it.

    ``died`` is set, with ``error`` saying why, as soon as the process is gone without having been asked
    to go; every question that is open then gets that error.  ``command`` is what is run; the number of
    its end of the channel's socketpair is added as the last argument.
    """

    def __init__(self, hello: Hello, command: Sequence[str] = _COMMAND) -> None:
        self.hello = hello
        self._command = command
        self.died = asyncio.Event()
        self.error: TokenflowError | None = None
        self._process: asyncio.SubprocessTransport | None = None
        self._exited = asyncio.Event()
        self._channel: Channel | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._step: asyncio.Future[StepDone] | None = None
        self._scores: dict[int, asyncio.Future[Scored]] = {}
        self._over = asyncio.Event()
        self._reason: Exception | None = None
        self._failure: Failure | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._stderr_line = b""
        self._stderr_closed = asyncio.Event()
        self._stopping = False

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it was started."""
        return self._process.get_pid() if self._process else 0

    async def start(self, tasks: TaskGroup) -> Ready:
        """Start the process and wait until its model is loaded.

        :raises ModelLoadError: if the model cannot be loaded.
        :raises WorkerDied: if the process ends before it is ready.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        # A process that is half started could not be ended.
        with theirs, anyio.CancelScope(shield=True):
            self._channel = await Channel.connect(ours, self)
            self._process, _ = await loop.subprocess_exec(
                lambda: self,
                *self._command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                start_new_session=True,
                env=worker_environment(self.hello.config.threads),
            )
            self._channel.send(self.hello)
        tasks.start_soon(self._watch, name=f"{self.hello.model}.worker")
        if self._stopping:
            self.kill()
        return await self._ready

    def step(self, step: Step) -> asyncio.Future[StepDone]:
        """Send a step; the answer fails with :class:`WorkerDied` if the worker ends before it comes."""
        assert self._channel is not None
        self._step = asyncio.get_running_loop().create_future()
        if self.error is not None:
            self._step.set_exception(WorkerDied(str(self.error)))
        self._channel.send(step)
        return self._step

    async def score(self, score: Score) -> Scored:
        """Ask for the log-probabilities of given tokens; the worker answers between two steps.

        :raises WorkerDied: if the worker ends before it has answered.
        """
        assert self._channel is not None
        if self.error is not None:
            raise WorkerDied(str(self.error))
        self._scores[score.id] = asyncio.get_running_loop().create_future()
        self._channel.send(score)
        try:
            return await self._scores[score.id]
        finally:
            del self._scores[score.id]

    async def stop(self, grace_s: float) -> None:
        """Ask the worker to finish; terminate and then kill it if it does not within ``grace_s`` each."""
        self._stopping = True
        if self._process is not None and self._channel is not None:
            self._channel.send(Stop())
            for last_resort in (signal.SIGTERM, signal.SIGKILL):
                with anyio.move_on_after(grace_s):
                    await self._exited.wait()
                self._signal(last_resort)
            await self._buried()
        if self._channel is not None:
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
            self._over.set()
        elif isinstance(message, Scored):
            # Whoever asked may have left.
            if (waiting := self._scores.get(message.id)) is not None and not waiting.done():
                waiting.set_result(message)
        else:
            raise ProtocolError(f"unexpected {type(message).__name__} from {self._name}")

    def closed(self, error: Exception | None) -> None:
        """Part of :class:`tokenflow.wire.channel.Receiver`."""
        self._reason = error
        self._over.set()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """The process wrote to its stderr."""
        *lines, rest = (self._stderr_line + data).split(b"\n")
        self._stderr_line = rest[-_LONGEST_LINE:]
        for line in lines:
            self._report(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Nobody holds the process's stderr any more."""
        if self._stderr_line:
            self._report(self._stderr_line)
        self._stderr_closed.set()

    def process_exited(self) -> None:
        """The process is gone; its end of the channel may live on in a process that it started."""
        self._exited.set()
        assert self._channel is not None
        asyncio.get_running_loop().call_later(_EXIT_GRACE_S, self._channel.close)

    @property
    def _name(self) -> str:
        return f"worker of model {self.hello.model!r} (pid {self.pid})"

    async def _watch(self) -> None:
        """Turn the end of the conversation into one error, told to everybody who waits."""
        await self._over.wait()
        with anyio.move_on_after(_EXIT_GRACE_S):
            await self._exited.wait()
        self._signal(signal.SIGKILL)
        self.error = self._explain(await self._buried())
        if not self._stopping:
            self.died.set()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        assert self.error is not None
        for waiting in (self._ready, self._step, *self._scores.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(self.error)
                waiting.exception()

    async def _buried(self) -> int:
        """Wait for the process's end and its last words; returns its exit code."""
        assert self._process is not None
        await self._exited.wait()
        with anyio.move_on_after(_EXIT_GRACE_S):
            await self._stderr_closed.wait()
        self._process.close()
        return self._process.get_returncode() or 0

    def _explain(self, code: int) -> TokenflowError:
        if self._failure is not None:
            log.debug("%s failed:\n%s", self._name, self._failure.traceback)
            return rebuild(self._failure.kind, f"model {self.hello.model!r}: {self._failure.message}")
        cause = f"exit code {code}" if code >= 0 else f"signal {-code} ({_signal_name(-code)})"
        reason = f" after {self._reason}" if isinstance(self._reason, ProtocolError) else ""
        lines = "".join(f"\n  {line}" for line in self._stderr)
        tail = f"; its last words:{lines}" if lines else ""
        return WorkerDied(f"{self._name} ended with {cause}{reason}{tail}")

    def _report(self, line: bytes) -> None:
        text = line[-_LONGEST_LINE:].decode(errors="replace").rstrip()
        self._stderr.append(text)
        log.warning("[%s] %s", self.hello.model, text)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the worker and whatever it has started, unless it is gone."""
        if self._process is not None and not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
