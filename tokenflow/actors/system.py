"""The actor system: starts and stops the actors of a recipe, admits requests, and keeps the global books.

It owns N, the number of active requests, and every decision that concerns more than one model: admission
to memory, preemption, thresholds, the end of a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import anyio
from anyio.abc import TaskGroup

from tokenflow.actors import nursery
from tokenflow.actors.admission import Admission, QueueLimits
from tokenflow.actors.batching import Batching
from tokenflow.actors.budgets import Budgets
from tokenflow.actors.child import Launch, spawn
from tokenflow.actors.handshake import Handshake
from tokenflow.actors.ledger import Ledger, Pool
from tokenflow.actors.model import ModelActor
from tokenflow.actors.nursery import Nursery
from tokenflow.actors.scoring import Scoring
from tokenflow.actors.sequence import Phase, Sequence
from tokenflow.actors.shares import Shares
from tokenflow.actors.status import model_statuses
from tokenflow.actors.supervisor import Condition, Supervisor
from tokenflow.dsl.ir import ModelIR, RecipeIR
from tokenflow.dsl.messages import PeerReq
from tokenflow.errors import RequestCancelled, RequestTimeout, RouterClosed, TokenflowError, WorkerDied
from tokenflow.eventloop import require_loop
from tokenflow.settings import settings
from tokenflow.types import FinishReason, Load, Reservation, RouterStatus
from tokenflow.wire.messages import Ready, Step, StepDone

log = logging.getLogger("tokenflow.system")

_UNSEEN = 64
"""Tokens: the router's part of a step is nothing when it is shared by so many."""

Observer = Callable[[str, Step, StepDone], None]


class ActorSystem:
    """All actors of one recipe.

    :param recipe: the compiled recipe; every model's ``path`` is a local directory.
    :param vocab_limit: ids from here on belong to no token and are never sampled.
    :param eos_token_ids: the union over the recipe's models.
    :param fingerprints: SHA-256 of ``tokenizer.json`` per model, as the router saw it.
    :param queue_limits: what may wait for memory at most.
    :param observer: called with every step a worker has run (model name, step, reply).
    """

    def __init__(
        self,
        recipe: RecipeIR,
        vocab_limit: int,
        eos_token_ids: tuple[int, ...],
        fingerprints: Mapping[str, str],
        queue_limits: QueueLimits,
        observer: Observer | None = None,
    ) -> None:
        self.recipe = recipe
        self.actors: dict[int, ModelActor] = {}
        self.scoring = Scoring()
        self._budgets = Budgets({recipe.model(name).code: budget for name, budget in recipe.budgets.items()})
        self.context_length = 0
        self.error: TokenflowError | None = None
        self._handshake = Handshake(recipe, vocab_limit, eos_token_ids, fingerprints)
        self._observer = observer
        self._models = [recipe.model(name) for name in recipe.reachable()]
        self._supervisors: list[Supervisor] = []
        self._nursery = Nursery()
        self._left = {model.code for model in self._models}
        self._ledger = Ledger({})
        self.admission = Admission(queue_limits, self._free_slots)
        self.batching = Batching(recipe, self.actors)
        self._queue: deque[Sequence] = deque()
        self._alarms: dict[int, asyncio.TimerHandle] = {}
        self._active: dict[int, Sequence] = {}

    @property
    def active(self) -> int:
        """N: requests that are admitted and not over."""
        return len(self._active)

    @property
    def queued(self) -> int:
        """Requests that wait for memory."""
        return len(self._queue)

    @property
    def longest(self) -> int:
        """Most tokens (prompt and output) of one request: the smallest context or KV cache of the recipe,
        less what may be tentative."""
        return min(self.context_length, self._ledger.longest) - self.recipe.rollback

    @property
    def load(self) -> Load:
        """How busy it is."""
        return Load(len(self._active), len(self._queue), self._ledger.slots)

    @property
    def status(self) -> RouterStatus:
        """What all of it is doing."""
        return RouterStatus(
            load=self.load,
            longest=self.longest,
            models=model_statuses(self.actors, self._ledger, self._active.values()),
        )

    async def start(self, tasks: TaskGroup) -> None:
        """Start every worker at once, wait until all are ready, then start the actors in ``tasks``.

        :raises ModelLoadError: if a model cannot be loaded or does not fit the recipe.
        :raises WorkerDied: if a worker ends while loading.
        """
        self._loop = asyncio.get_running_loop()
        shares = Shares({model.name: model.config.kv_cache for model in self._models})
        self._supervisors = [
            Supervisor(
                self._handshake.hello(model),
                self._handshake.trial(),
                self._launch(model),
                partial(shares.grant, model.name),
                partial(self._handshake.check, model.name),
                self._changed,
            )
            for model in self._models
        ]
        ready = await _all_ready(self.recipe, self._supervisors, tasks)
        pools = {
            model.name: Pool(facts.kv_capacity, facts.block_size, facts.max_requests)
            for model, facts in zip(self._models, ready, strict=True)
        }
        self._ledger = Ledger(pools)
        self.context_length = min(facts.context_length for facts in ready)
        for model, supervisor in zip(self._models, self._supervisors, strict=True):
            slots = pools[model.name].slots
            actor = ModelActor(self.recipe, model, supervisor, self, self.batching, slots)
            self.actors[model.code] = actor
            tasks.start_soon(actor.decode_loop, name=f"{model.name}.decode")
            tasks.start_soon(supervisor.keep_alive, tasks, name=f"{model.name}.supervisor")
        spare = all(facts.device != "cpu" for facts in ready)
        poll = settings().poll
        self.batching.start(tasks, self._ledger.slots, spare if poll is None else poll, spare)

    async def stop(self, grace_s: float) -> None:
        """Abort open requests and stop every worker, in reverse order of their start.

        A worker gets ``grace_s`` to finish what it is doing, and as long again to be terminated.
        """
        require_loop(self._loop)
        self.error = self.error or RouterClosed("the router is stopped")
        for sequence in [*self._active.values(), *self._queue]:
            self.finish(
                sequence, error=RequestCancelled("the router stopped before the response was complete")
            )
        async with anyio.create_task_group() as stopping:
            for supervisor in reversed(self._supervisors):
                stopping.start_soon(supervisor.stop, grace_s)
        await self._nursery.stop()

    def submit(self, sequence: Sequence, reservation: Reservation) -> None:
        """Queue a request in its place; it starts as soon as every model it can reach has memory for it.

        :raises Overloaded: if the prompts that wait are too long together.
        :raises RouterClosed: if the system is stopped.
        :raises WorkerDied: if a model that it needs is given up.
        """
        self.require_running()
        if not self.allows(sequence, sequence.holder):
            sequence.holder = self.home(sequence)
        self.admission.queue(sequence.id, sequence.prompt_tokens, reservation)
        self._queue.append(sequence)
        if (seconds := sequence.limits.timeout_s) is not None:
            loop = asyncio.get_running_loop()
            self._alarms[sequence.id] = loop.call_later(seconds, self._expire, sequence, seconds)
        # While somebody waits, only a request that ends makes room: what was preempted would otherwise
        # come straight back and be preempted again.
        if len(self._queue) == 1:
            self._admit()

    def require_running(self) -> None:
        """Refuse what comes too late.

        :raises RouterClosed: if the system is stopped.
        :raises WorkerDied: if a worker it needs is gone.
        :raises RuntimeError: in another event loop than its own.
        """
        require_loop(self._loop)
        if self.error is not None:
            raise type(self.error)(str(self.error))

    def abort(self, sequence: Sequence) -> None:
        """End a request wherever it is: queued, waiting, running, or on its way to a peer.  Idempotent."""
        self.finish(sequence, error=RequestCancelled("the request was cancelled"))

    def allows(self, sequence: Sequence, code: int) -> bool:
        """Whether model ``code`` is there and may write one more token of a request."""
        return code in self._left and self._budgets.allows(sequence, code)

    def home(self, sequence: Sequence) -> int:
        """The model that a request comes back to where it may not stay: the entry, or one that is left.

        :raises WorkerDied: if none that is left may go on with it.
        """
        entry = self.recipe.model(self.recipe.entry).code
        for code in (entry, *sorted(self._left)):
            if self.allows(sequence, code):
                return code
        gone = [model.name for model in self._models if model.code not in self._left]
        raise WorkerDied(f"without {', '.join(gone)}, no model of the recipe may go on with this request")

    async def gone(self, sequence: Sequence) -> None:
        """Wait until no worker holds anything of a request that is over."""
        for actor in self.actors.values():
            await actor.gone(sequence)

    def deliver(self, sender: int, peer: int, sequence: Sequence, request: PeerReq) -> None:
        """Pass a hand-off from the actor of model ``sender`` to that of model ``peer``."""
        self.actors[peer].receive(sender, sequence, request)
        self.batching.handed_over(self._active.values())

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Take back all but the first ``length`` tokens of a request, everywhere."""
        sequence.rewind(length)
        for actor in self.actors.values():
            actor.rewind(sequence, length)

    def grew(self, sequence: Sequence) -> bool:
        """Account for a committed token; answers whether the request is still active.

        When a KV cache is full, the youngest request is preempted on all models: it keeps its committed
        tokens and is rebuilt from them once there is room.
        """
        self._ledger.hold(sequence.id, len(sequence.tokens) + 1)
        while self._ledger.overdrawn:
            self._preempt(self._active[max(self._active)])
        return sequence.phase is Phase.ACTIVE

    def reserve(self, sequence: Sequence) -> None:
        """Book memory for tokens to come, so that a worker may write some before they are seen here."""
        length = len(sequence.tokens) + 1
        if sequence.booked - length < _UNSEEN * 3 // 4 and sequence.phase is Phase.ACTIVE and not self._queue:
            longest = sequence.prompt_tokens + sequence.limits.max_tokens
            sequence.booked = self._ledger.reserve(sequence.id, min(length + _UNSEEN, longest))

    def finish(
        self, sequence: Sequence, reason: FinishReason | None = None, error: TokenflowError | None = None
    ) -> None:
        """End a request, unless it is over; every model forgets it, and what waits for memory may start."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence.phase is Phase.QUEUED:
            self._queue.remove(sequence)
            self.admission.leave(sequence.id)
        if (alarm := self._alarms.pop(sequence.id, None)) is not None:
            alarm.cancel()
        self._release(sequence)
        sequence.end(reason, error)
        self._admit()
        self._follow()

    def slowest_step_s(self) -> float:
        """Typical duration of the slowest model's step."""
        return max(actor.counters.step_average_s for actor in self.actors.values())

    def observe(self, model: str, step: Step, done: StepDone) -> None:
        """A step was run."""
        if self._observer is not None:
            self._observer(model, step, done)

    def _launch(self, model: ModelIR) -> Launch:
        """Engines that import torch and little else come from the nursery."""
        engine = model.config.engine
        forks = nursery.AVAILABLE and (engine == "torch" or ":" in engine)
        return self._nursery.launch if forks else spawn

    def _free_slots(self) -> int:
        return 0 if self._queue else self._ledger.slots - len(self._active)

    def _admit(self) -> None:
        while self._queue and self.error is None:
            sequence = self._queue[0]
            if not self._ledger.admits(len(sequence.tokens) + 1):
                return
            self._queue.popleft()
            self.admission.leave(sequence.id)
            self._ledger.hold(sequence.id, len(sequence.tokens) + 1)
            sequence.phase = Phase.ACTIVE
            sequence.admitted_at = sequence.admitted_at or time.monotonic()
            self._active[sequence.id] = sequence
            self._follow()
            self.actors[sequence.holder].admit(sequence)

    def _expire(self, sequence: Sequence, seconds: float) -> None:
        message = f"the request took longer than its timeout of {seconds:g} s"
        self.finish(sequence, error=RequestTimeout(f"{message}; {sequence.final} tokens were written"))

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.phase = Phase.QUEUED
        sequence.epoch += 1
        self._queue.appendleft(sequence)
        self._follow()

    def _release(self, sequence: Sequence) -> None:
        self._active.pop(sequence.id, None)
        self._ledger.release(sequence.id)
        sequence.booked = 0
        for actor in self.actors.values():
            actor.forget(sequence)

    def _follow(self) -> None:
        left = [actor for code, actor in self.actors.items() if code in self._left]
        whole = all(actor.supervisor.condition is Condition.READY for actor in left)
        self.batching.follow(self._active.values(), whole)

    def _changed(self, supervisor: Supervisor) -> None:
        """A model's worker is ready, is being replaced, or is given up."""
        if supervisor.condition is Condition.DOWN:
            self._give_up(supervisor)
        self._follow()

    def _give_up(self, supervisor: Supervisor) -> None:
        """Go on without a model, or end everything, as the recipe says."""
        model = self.recipe.model(supervisor.model)
        self._left.discard(model.code)
        requests = [*self._active.values(), *self._queue]
        if self.recipe.on_failure == "degrade" and self._left:
            log.error("recipe %r goes on without model %r", self.recipe.name, model.name)
            for sequence in requests:
                if sequence.holder == model.code:
                    self._reroute(sequence)
            return
        self.error = supervisor.error
        for sequence in requests:
            self.finish(sequence, error=WorkerDied(str(supervisor.error)))

    def _reroute(self, sequence: Sequence) -> None:
        """Move a request away from a model that is given up; whoever has left it a position must write it."""
        sequence.gave_up.clear()
        self.actors[sequence.holder].forget(sequence)
        try:
            home = self.home(sequence)
        except WorkerDied as error:
            self.finish(sequence, error=error)
            return
        if sequence.phase is Phase.QUEUED:
            sequence.holder = home
            return
        sequence.move(home)
        self.actors[home].admit(sequence)


async def _all_ready(recipe: RecipeIR, supervisors: list[Supervisor], tasks: TaskGroup) -> list[Ready]:
    """Start workers side by side; the first failure ends the others' loading and is raised."""
    ready: dict[int, Ready] = {}
    failures: list[TokenflowError] = []
    async with anyio.create_task_group() as loading:

        async def load(index: int, supervisor: Supervisor) -> None:
            try:
                ready[index] = await supervisor.start(tasks)
            except TokenflowError as error:
                failures.append(recipe.notes.locate(("models", supervisor.model), error))
                loading.cancel_scope.cancel()

        for index, supervisor in enumerate(supervisors):
            loading.start_soon(load, index, supervisor)
    if failures:
        raise failures[0]
    return [ready[index] for index in range(len(supervisors))]
