"""A worker process as its actor sees it: start, ask, stop, and the truth about its death."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from tokenflow.actors.child import Child, Launch, spawn
from tokenflow.actors.fork import keep_from_forks
from tokenflow.actors.words import LastWords
from tokenflow.errors import ProtocolError, TokenflowError, WorkerDied, rebuild
from tokenflow.wire.channel import Channel
from tokenflow.wire.messages import (
    Claim,
    Failure,
    Grant,
    Hello,
    Hold,
    Ready,
    Score,
    Scored,
    Step,
    StepDone,
    Stop,
    ToRouter,
)

_EXIT_GRACE_S = 1.0
_DUMP_GRACE_S = 0.5
_LATE_S = 0.05
_UNKILLABLE_S = 10.0
"""A process that the kernel cannot end (its device hangs) is no longer waited for."""

log = logging.getLogger("tokenflow.worker")

Grants = Callable[[Claim], Awaitable[Grant]]


class WorkerProcess:
    """One worker process and the channel to it.

    ``died`` is set, with ``error`` saying why, as soon as the process is gone without having been asked
    to go; every question that is open then gets that error.  A worker that does not answer in time is dead
    as well: it is made to print its stack, and killed.  ``steps`` counts the steps it has completed.
    ``launch`` starts the process, and ``grant`` answers what it claims of its devices before it loads.
    """

    def __init__(self, hello: Hello, launch: Launch = spawn, grant: Grants | None = None) -> None:
        self.hello = hello
        self._launch = launch
        self._grant = grant
        self.died = asyncio.Event()
        self.error: TokenflowError | None = None
        self.steps = 0
        self._child: Child | None = None
        self._channel: Channel | None = None
        self._claim: asyncio.Future[Claim] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._step: asyncio.Future[StepDone] | None = None
        self._ahead: deque[asyncio.Future[StepDone]] = deque()
        self._scores: dict[int, asyncio.Future[Scored]] = {}
        # In the order in which the worker does it: what it ends of is the first.
        self._asked: deque[asyncio.Future[StepDone] | asyncio.Future[Scored]] = deque()
        self._deadline: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()
        self._reason = ""
        self._hangs = False
        self._failure: Failure | None = None
        self._words = LastWords(hello.model)
        self._stopping = False

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it was started."""
        return self._child.pid if self._child else 0

    @property
    def busy(self) -> bool:
        """Whether a step is on its way."""
        return self._step is not None and not self._step.done()

    async def start(self, tasks: TaskGroup) -> Ready:
        """Start the process and wait until its model is loaded.

        :raises ModelLoadError: if the model cannot be loaded.
        :raises WorkerDied: if the process ends before it is ready, or takes too long.
        """
        loop = asyncio.get_running_loop()
        self._claim, self._ready = loop.create_future(), loop.create_future()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        keep_from_forks(ours)
        with theirs:
            with anyio.CancelScope(shield=True):
                channel = self._channel = await Channel.connect(ours, self)
                stderr = self._words.open()
            try:
                self._child = await self._launch(theirs.fileno(), stderr, self.hello.config.threads)
            except BaseException:
                channel.close()
                self._words.close()
                raise
            finally:
                os.close(stderr)
        self._child.when_ended(self._exited)
        channel.send(self.hello)
        self._expect(self.hello.config.load_timeout)
        tasks.start_soon(self._watch, name=f"{self.hello.model}.worker")
        if self._stopping:
            self.kill()
        with self._child.awake():
            claim = await self._claim
            granted = Grant(self.hello.config.kv_cache) if self._grant is None else await self._grant(claim)
            channel.send(granted)
            self._expect(self.hello.config.load_timeout)
            return await self._ready

    def step(self, step: Step) -> asyncio.Future[StepDone]:
        """Send a step; the answer fails with :class:`WorkerDied` if the worker ends before it comes."""
        assert self._channel is not None
        self._step = asyncio.get_running_loop().create_future()
        if self.error is not None:
            self._step.set_exception(WorkerDied(str(self.error)))
        else:
            self._channel.send(step)
            self._ask(self._step)
        return self._step

    def ahead(self) -> asyncio.Future[StepDone]:
        """The answer to the step that the worker has begun by itself, as the last answer said."""
        return self._ahead.popleft()

    def hold(self) -> None:
        """The worker shall begin no further step by itself."""
        assert self._channel is not None
        self._channel.send(Hold())

    async def score(self, score: Score) -> Scored | None:
        """Ask for the log-probabilities of given tokens; the worker answers between two steps.

        None if the worker ended before it came to that, or for something else.

        :raises WorkerDied: if the worker ended while it was at it.
        """
        assert self._channel is not None
        while self._scores and self.error is None:
            # Whoever asked has left: steps shall come in between all the same.
            await asyncio.wait(self._scores.values())
        if self.error is not None:
            return None
        unheard = self._over.is_set()
        waiting: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._scores[score.id] = waiting
        self._channel.send(score)
        self._ask(waiting)
        try:
            return await asyncio.shield(waiting)
        except TokenflowError as error:
            if unheard or self._stopping or self._asked[0] is not waiting:
                return None
            raise WorkerDied(str(error)) from None

    async def stop(self, grace_s: float) -> None:
        """Ask the worker to finish; terminate and then kill it if it does not within ``grace_s`` each."""
        self._stopping = True
        self._rest()
        if self._child is not None and self._channel is not None:
            self._channel.send(Stop())
            for last_resort in (signal.SIGTERM, signal.SIGKILL):
                with self._child.awake(), anyio.move_on_after(grace_s):
                    await self._child.wait()
                self._child.kill_group(last_resort)
            await self._buried()
        if self._channel is not None:
            self._channel.close()

    def kill(self) -> None:
        """End the worker at once, without asking."""
        self._stopping = True
        if self._child is not None:
            self._child.kill_group(signal.SIGKILL)
        if self._channel is not None:
            self._channel.close()

    async def fail(self, error: TokenflowError) -> None:
        """End the worker because of ``error``, unless it has died of something by itself."""
        if not self.died.is_set():
            self.error = error
            self.kill()
            if self._child is not None:
                await self._buried()
            self.died.set()

    def received(self, message: ToRouter) -> None:
        """Part of :class:`tokenflow.wire.channel.Receiver`."""
        if self._hangs:
            return  # it is being killed, and what it was asked for is asked again elsewhere
        if isinstance(message, StepDone) and self._step is not None and not self._step.done():
            self.steps += bool(message.rows or message.failed)
            answered = self._step
            self._asked.remove(answered)
            if message.ahead:
                self._step = answered.get_loop().create_future()
                self._ahead.append(self._step)
                self._asked.appendleft(self._step)
            answered.set_result(message)
            self._answered()
        elif isinstance(message, Claim) and self._claim is not None and not self._claim.done():
            self._rest()
            self._claim.set_result(message)
        elif isinstance(message, Ready) and self._ready is not None and not self._ready.done():
            self._rest()
            self._ready.set_result(message)
        elif isinstance(message, Failure):
            self._failure = message
            self._over.set()
        elif isinstance(message, Scored) and message.id in self._scores:
            waiting = self._scores.pop(message.id)
            self._asked.remove(waiting)
            waiting.set_result(message)
            self._answered()
        else:
            raise ProtocolError(f"unexpected {type(message).__name__} from {self._name}")

    def closed(self, error: Exception | None) -> None:
        """Part of :class:`tokenflow.wire.channel.Receiver`."""
        if isinstance(error, ProtocolError):
            self._reason = str(error)
        self._over.set()

    def _exited(self) -> None:
        """The process is gone; its end of the channel may live on in a process that it started."""
        asyncio.get_running_loop().call_later(_EXIT_GRACE_S, self._over.set)

    @property
    def _name(self) -> str:
        return f"worker of model {self.hello.model!r} (pid {self.pid})"

    def _ask(self, answer: asyncio.Future[StepDone] | asyncio.Future[Scored]) -> None:
        self._asked.append(answer)
        self._expect(self.hello.config.step_timeout)

    def _expect(self, seconds: float) -> None:
        """Something has to come within ``seconds``; not later because more is asked meanwhile."""
        if self._deadline is None:
            self._look_after(seconds, seconds)

    def _look_after(self, wait: float, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(wait, self._overdue, seconds, loop.time() + wait)

    def _answered(self) -> None:
        """It has done one thing; what else it was asked for takes as long again."""
        self._rest()
        if self._asked and not self._stopping:
            self._expect(self.hello.config.step_timeout)

    def _rest(self) -> None:
        """Nothing has to come."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _overdue(self, seconds: float, due: float) -> None:
        self._deadline = None
        late = asyncio.get_running_loop().time() - due
        if late > seconds / 2:
            # This process was held up itself, by whatever held up the worker.
            self._expect(seconds)
            return
        if late > _LATE_S:
            # The answer may have come meanwhile: uvloop looks at its timers before it reads that.
            self._look_after(_LATE_S, seconds)
            return
        self._reason = f"no answer within {seconds:g} s"
        self._hangs = True
        self._over.set()

    async def _watch(self) -> None:
        """Turn the end of the conversation into one error, told to everybody who waits."""
        assert self._child is not None and self._channel is not None
        await self._over.wait()
        self._rest()
        if self._hangs:
            await self._dump(self._child)
        else:
            with anyio.move_on_after(_EXIT_GRACE_S):
                await self._child.wait()
        self._child.kill_group(signal.SIGKILL)
        code = await self._buried()
        self.error = self.error or self._explain(code)
        self._channel.close()
        self._rest()
        if not self._stopping:
            self.died.set()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        assert self.error is not None
        for waiting in (self._claim, self._ready, self._step, *self._scores.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(self.error)
                waiting.exception()

    async def _dump(self, child: Child) -> None:
        """Let a worker that hangs print where; one that somebody has stopped must go on to do so."""
        log.error("%s gave %s; its stack follows", self._name, self._reason)
        child.kill(signal.SIGUSR1)
        child.kill(signal.SIGCONT)
        with anyio.move_on_after(_DUMP_GRACE_S):
            await child.wait()

    async def _buried(self) -> int | None:
        """Wait for the process's end and its last words; returns its exit code."""
        assert self._child is not None
        code = None
        with anyio.move_on_after(_UNKILLABLE_S):
            code = await self._child.wait()
        with anyio.move_on_after(_EXIT_GRACE_S):
            await self._words.closed.wait()
        self._words.close()
        return code

    def _explain(self, code: int | None) -> TokenflowError:
        if self._failure is not None:
            log.debug("%s failed:\n%s", self._name, self._failure.traceback)
            return rebuild(self._failure.kind, f"model {self.hello.model!r}: {self._failure.message}")
        return WorkerDied(f"{self._name} ended with {self._words.ending(code, self._reason)}")
