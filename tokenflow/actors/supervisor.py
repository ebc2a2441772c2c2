"""Keeps a model's worker alive: a dead one is replaced, within a budget.

A worker is a cache of what its actor knows, so a replacement needs nothing of its predecessor.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from tokenflow.actors.child import Launch
from tokenflow.actors.process import Grants, WorkerProcess
from tokenflow.errors import ModelLoadError, RouterClosed, TokenflowError, WorkerDied
from tokenflow.limits import said
from tokenflow.wire.messages import Hello, Ready, Step

_DOUBTFUL_DEATHS = 2
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 10.0

log = logging.getLogger("tokenflow.supervisor")


class Condition(enum.Enum):
    """How a model is."""

    LOADING = "loading"
    """Its first worker is not ready yet."""
    READY = "ready"
    RESTARTING = "restarting"
    """Its worker died, and is being replaced."""
    DOWN = "down"
    """Its workers died too often in a row: it is given up."""


class Supervisor:
    """The worker of one model, one process after the other.

    The budget is about deaths in a row without a completed step: ``config.restarts`` are made good, the
    next one ends the model, with ``error`` saying why.  ``restarts`` counts all replacements.

    After two deaths in a row a replacement first runs a step on trial, of nobody's request: one that cannot
    is dead as well, and one that can shows that it was the requests' fault.  So a model that is broken is
    given up whoever asks, and no number of requests that kill workers takes a sound one down.

    :param hello: what every worker of the model is told.
    :param trial: the step on trial; it opens handle 0, which no request has.
    :param launch: starts a process.
    :param grant: answers what a worker claims of its devices.
    :param check: raises if a worker does not fit.
    :param changed: called whenever ``condition`` has changed.
    """

    def __init__(
        self,
        hello: Hello,
        trial: Step,
        launch: Launch,
        grant: Grants,
        check: Callable[[Ready], None],
        changed: Callable[[Supervisor], None],
    ) -> None:
        self.condition = Condition.LOADING
        self.error: TokenflowError | None = None
        self.restarts = 0
        self._hello = hello
        self._trial = trial
        self._launch = launch
        self._grant = grant
        self._check = check
        self._changed = changed
        self._worker = WorkerProcess(hello, launch, grant)
        self._settled = asyncio.Event()
        self._stopping = False
        self._first: Ready

    @property
    def model(self) -> str:
        """The model's name."""
        return self._hello.model

    @property
    def pid(self) -> int:
        """Process id of the present worker; 0 before it has one."""
        return self._worker.pid

    @property
    def busy(self) -> bool:
        """Whether a step is on its way."""
        return self._worker.busy

    async def start(self, tasks: TaskGroup) -> Ready:
        """Start the first worker; whatever is wrong with it is raised.

        :raises ModelLoadError: if the model cannot be loaded, or does not fit the recipe.
        :raises WorkerDied: if the process cannot be started, or ends while loading.
        """
        facts = await self._start(self._worker, tasks)
        self._first = facts
        self._set(Condition.READY)
        return facts

    async def ready(self) -> WorkerProcess:
        """The present worker, once it is ready.

        :raises WorkerDied: if the model is given up.
        :raises RouterClosed: if it is stopped.
        """
        if self._worker.error is not None and self.error is None:
            # Whoever used it may know of its death before we do.
            self._settled.clear()
        await self._settled.wait()
        if self.error is not None:
            # Of its own: an error keeps the frames of everybody that it was raised for.
            raise type(self.error)(str(self.error))
        return self._worker

    async def keep_alive(self, tasks: TaskGroup) -> None:
        """Replace the worker whenever it dies, until the budget is used up; its tasks run in ``tasks``."""
        deaths = 0
        while True:
            await self._worker.died.wait()
            if self._stopping:
                return
            deaths = 1 if self._worker.steps else deaths + 1
            error = self._worker.error or WorkerDied(f"the worker of model {self.model!r} is gone")
            if deaths > self._hello.config.restarts:
                self.error = WorkerDied(
                    f"model {self.model!r} is given up: {deaths} of its workers died in a row without "
                    f"completing a step; the last: {error}"
                )
                log.error("%s", self.error)
                self._set(Condition.DOWN)
                return
            delay = backoff_s(deaths)
            log.error("%s; another one is started%s", error, f" in {delay:g} s" if delay else "")
            self._set(Condition.RESTARTING)
            await anyio.sleep(delay)
            if self._stopping:
                return
            self.restarts += 1
            self._worker = WorkerProcess(self._hello, self._launch, self._grant)
            await self._restart(self._worker, tasks, on_trial=deaths >= _DOUBTFUL_DEATHS)

    async def stop(self, grace_s: float) -> None:
        """Stop the worker, within ``grace_s`` or by force, for good."""
        self._stopping = True
        self.error = self.error or RouterClosed("the router is stopped")
        self._settled.set()
        await self._worker.stop(grace_s)

    async def _restart(self, worker: WorkerProcess, tasks: TaskGroup, *, on_trial: bool) -> None:
        """Start a replacement; one that fails is dead, with the reason as its error."""
        try:
            self._refuse_less(await self._start(worker, tasks))
            if on_trial:
                await worker.step(self._trial)
                await worker.step(Step(self._trial.id, drop=[0], open=[], truncate=[], rows=[]))
        except TokenflowError as error:
            await worker.fail(error)
        else:
            self._set(Condition.READY)

    async def _start(self, worker: WorkerProcess, tasks: TaskGroup) -> Ready:
        try:
            facts = await worker.start(tasks)
        except OSError as error:
            raise WorkerDied(f"a worker of model {self.model!r} cannot be started: {said(error)}") from None
        self._check(facts)
        return facts

    def _refuse_less(self, facts: Ready) -> None:
        """Requests are admitted by what the first worker had room for.

        An engine that takes what is free may find less as long as its predecessor's memory is not back.
        """
        for what in ("kv_capacity", "max_requests", "context_length"):
            now, first = getattr(facts, what), getattr(self._first, what)
            if now < first:
                raise ModelLoadError(
                    f"the new worker of model {self.model!r} has a {what} of {now}, and the first had {first}"
                )

    def _set(self, condition: Condition) -> None:
        self.condition = condition
        if condition in (Condition.READY, Condition.DOWN):
            self._settled.set()
        else:
            self._settled.clear()
        self._changed(self)


def backoff_s(deaths: int) -> float:
    """Seconds to wait after so many deaths in a row; nothing after the first."""
    return min(_FIRST_BACKOFF_S * 2 ** (deaths - 2), _LONGEST_BACKOFF_S) if deaths > 1 else 0.0
