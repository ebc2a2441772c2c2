"""The actor system: starts and stops the actors of a recipe, admits requests, and keeps the global books.

It owns N, the number of active requests, and every decision that concerns more than one model: admission
to memory, preemption, thresholds, the end of a request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import anyio
from anyio.abc import TaskGroup

from tokenflow.actors.budgets import Budgets
from tokenflow.actors.ledger import Ledger, Pool
from tokenflow.actors.model import ModelActor
from tokenflow.actors.process import WorkerProcess
from tokenflow.actors.scoring import Scoring
from tokenflow.actors.sequence import Phase, Sequence
from tokenflow.actors.status import model_statuses
from tokenflow.actors.thresholds import feasible
from tokenflow.dsl.ir import ModelIR, PythonIR, RecipeIR
from tokenflow.dsl.messages import PeerReq
from tokenflow.errors import ModelLoadError, RequestCancelled, RouterClosed, TokenflowError
from tokenflow.types import FinishReason, Load, RouterStatus
from tokenflow.wire.messages import VERSION, HeadSpec, Hello, PythonSpec, Ready, RouteRule, Step, StepDone

Observer = Callable[[str, Step, StepDone], None]


class ActorSystem:
    """All actors of one recipe.

    :param recipe: the compiled recipe; every model's ``path`` is a local directory.
    :param vocab_limit: ids from here on belong to no token and are never sampled.
    :param eos_token_ids: the union over the recipe's models.
    :param fingerprints: SHA-256 of ``tokenizer.json`` per model, as the router saw it.
    :param observer: called with every step a worker has run (model name, step, reply).
    """

    def __init__(
        self,
        recipe: RecipeIR,
        vocab_limit: int,
        eos_token_ids: tuple[int, ...],
        fingerprints: Mapping[str, str],
        observer: Observer | None = None,
    ) -> None:
        self.recipe = recipe
        self.actors: dict[int, ModelActor] = {}
        self.budgets = Budgets({recipe.model(name).code: budget for name, budget in recipe.budgets.items()})
        self.scoring = Scoring()
        self.context_length = 0
        self.error: TokenflowError | None = None
        self._vocab_limit = vocab_limit
        self._eos_token_ids = eos_token_ids
        self._fingerprints = fingerprints
        self._observer = observer
        self._models = [recipe.model(name) for name in recipe.reachable()]
        self._workers: list[WorkerProcess] = []
        self._ledger = Ledger({})
        self._queue: deque[Sequence] = deque()
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
        self._workers = [WorkerProcess(self._hello(model)) for model in self._models]
        ready = await _all_ready(self._workers, tasks)
        for model, facts in zip(self._models, ready, strict=True):
            self._check(model, facts)
        pools = {
            model.name: Pool(facts.kv_capacity, facts.block_size, facts.max_requests)
            for model, facts in zip(self._models, ready, strict=True)
        }
        self._ledger = Ledger(pools)
        self.context_length = min(facts.context_length for facts in ready)
        for model, worker in zip(self._models, self._workers, strict=True):
            actor = ModelActor(self.recipe, model, worker, self, pools[model.name].slots)
            self.actors[model.code] = actor
            tasks.start_soon(actor.decode_loop, name=f"{model.name}.decode")
            tasks.start_soon(self._watch, worker, name=f"{model.name}.watch")

    async def stop(self, grace_s: float) -> None:
        """Abort open requests and stop every worker, in reverse order of their start.

        A worker gets ``grace_s`` to finish what it is doing, and as long again to be terminated.
        """
        self.error = self.error or RouterClosed("the router is stopped")
        for sequence in [*self._active.values(), *self._queue]:
            self.finish(
                sequence, error=RequestCancelled("the router stopped before the response was complete")
            )
        async with anyio.create_task_group() as stopping:
            for worker in reversed(self._workers):
                stopping.start_soon(worker.stop, grace_s)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; it starts as soon as every model it can reach has memory for it.

        :raises RouterClosed: if the system is stopped.
        :raises WorkerDied: if a worker it needs is gone.
        """
        self.require_running()
        if not self.budgets.allows(sequence, sequence.holder):
            sequence.holder = self.recipe.model(self.recipe.entry).code
        self._queue.append(sequence)
        # While somebody waits, only a request that ends makes room: what was preempted would otherwise
        # come straight back and be preempted again.
        if len(self._queue) == 1:
            self._admit()

    def require_running(self) -> None:
        """Refuse what comes too late.

        :raises RouterClosed: if the system is stopped.
        :raises WorkerDied: if a worker it needs is gone.
        """
        if self.error is not None:
            raise type(self.error)(str(self.error))

    def abort(self, sequence: Sequence) -> None:
        """End a request wherever it is: queued, waiting, running, or on its way to a peer.  Idempotent."""
        if sequence.phase is not Phase.FINISHED:
            self.finish(sequence, error=RequestCancelled("the request was cancelled"))

    def deliver(self, sender: int, peer: int, sequence: Sequence, request: PeerReq) -> None:
        """Pass a hand-off from the actor of model ``sender`` to that of model ``peer``."""
        self.actors[peer].receive(sender, sequence, request)

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

    def finish(
        self, sequence: Sequence, reason: FinishReason | None = None, error: TokenflowError | None = None
    ) -> None:
        """End a request; every model forgets it, and what waits for memory may start."""
        if sequence.phase is Phase.QUEUED:
            self._queue.remove(sequence)
        self._release(sequence)
        sequence.end(reason, error)
        self._admit()
        self._set_thresholds()

    def slowest_step_s(self) -> float:
        """Typical duration of the slowest model's step."""
        return max(actor.counters.step_average_s for actor in self.actors.values())

    def observe(self, model: str, step: Step, done: StepDone) -> None:
        """A step was run."""
        if self._observer is not None:
            self._observer(model, step, done)

    def _admit(self) -> None:
        while self._queue and self.error is None:
            sequence = self._queue[0]
            if not self._ledger.admits(len(sequence.tokens) + 1):
                return
            self._queue.popleft()
            self._ledger.hold(sequence.id, len(sequence.tokens) + 1)
            sequence.phase = Phase.ACTIVE
            sequence.admitted_at = sequence.admitted_at or time.monotonic()
            self._active[sequence.id] = sequence
            self._set_thresholds()
            self.actors[sequence.holder].admit(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.phase = Phase.QUEUED
        sequence.epoch += 1
        self._queue.appendleft(sequence)
        self._set_thresholds()

    def _release(self, sequence: Sequence) -> None:
        self._active.pop(sequence.id, None)
        self._ledger.release(sequence.id)
        for actor in self.actors.values():
            actor.forget(sequence)

    def _set_thresholds(self) -> None:
        names = {actor.model.name: actor for actor in self.actors.values()}
        wanted = {name: self.recipe.batching.thresholds.get(name, 1) for name in names}
        for name, threshold in feasible(wanted, self.active).items():
            names[name].set_threshold(threshold)

    async def _watch(self, worker: WorkerProcess) -> None:
        """Without its worker a recipe cannot go on: everybody who waits learns why."""
        await worker.died.wait()
        self.error = worker.error
        for sequence in [*self._active.values(), *self._queue]:
            error = worker.error or RouterClosed("the worker is gone")
            self.finish(sequence, error=type(error)(str(error)))

    def _hello(self, model: ModelIR) -> Hello:
        recipe = self.recipe
        codes = {other.name: other.code for other in recipe.models}
        return Hello(
            version=VERSION,
            model=model.name,
            code=model.code,
            config=model.config,
            rules=tuple(RouteRule(rule.when, codes[rule.to]) for rule in recipe.routes.get(model.name, ())),
            params=tuple(recipe.params),
            vocab_limit=self._vocab_limit,
            eos_token_ids=self._eos_token_ids,
            heads=tuple(
                HeadSpec(head.name, head.kind, head.path, head.threshold, head.dtype)
                for head in recipe.heads.values()
                if head.model == model.name
            ),
            python=_python_spec(recipe.python.get(model.name), codes),
            models=len(recipe.models),
        )

    def _check(self, model: ModelIR, facts: Ready) -> None:
        if facts.version != VERSION:
            raise ModelLoadError(
                f"the worker of model {model.name!r} speaks version {facts.version}, not {VERSION}"
            )
        if facts.vocab_size < self._vocab_limit:
            raise ModelLoadError(
                f"model {model.name!r} has logits for {facts.vocab_size} ids, fewer than the "
                f"{self._vocab_limit} of the tokenizer"
            )
        if facts.tokenizer != self._fingerprints.get(model.name, facts.tokenizer):
            raise ModelLoadError(
                f"the worker of model {model.name!r} sees another tokenizer.json than the router"
            )


async def _all_ready(workers: list[WorkerProcess], tasks: TaskGroup) -> list[Ready]:
    """Start workers side by side; the first failure ends the others' loading and is raised as it is."""
    ready: dict[int, Ready] = {}
    failures: list[TokenflowError] = []
    async with anyio.create_task_group() as loading:

        async def load(index: int, worker: WorkerProcess) -> None:
            try:
                ready[index] = await worker.start(tasks)
            except TokenflowError as error:
                failures.append(error)
                loading.cancel_scope.cancel()

        for index, worker in enumerate(workers):
            loading.start_soon(load, index, worker)
    if failures:
        raise failures[0]
    return [ready[index] for index in range(len(workers))]


def _python_spec(python: PythonIR | None, codes: Mapping[str, int]) -> PythonSpec | None:
    """What the worker imports of a model's Python; None where rules decide."""
    if python is None or not python.routes:
        return None
    peer = 0 if python.peer is None else codes[python.peer]
    return PythonSpec(python.file, python.route or "", python.router or "", peer, dict(python.signals))
