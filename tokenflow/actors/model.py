"""The actor of one model: a mailbox, the loop that empties it, and what its worker holds of each request.

Three sides meet in the mailbox.  Clients put new requests in (``admit``), peers put in what they hand over
(``receive``), and ``decode_loop``, the actor's one task, runs batches on the worker and turns replies into
commits and hand-offs.  Nothing here waits for another model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import Protocol

from tokenflow.actors.answers import check_answer
from tokenflow.actors.batching import Batching
from tokenflow.actors.bounces import handoff_failed, livelock, no_progress
from tokenflow.actors.counters import Counters
from tokenflow.actors.handoff import Handoffs
from tokenflow.actors.held import Held
from tokenflow.actors.leash import Leash
from tokenflow.actors.mailbox import Mailbox
from tokenflow.actors.process import WorkerProcess
from tokenflow.actors.sequence import Phase, Sequence
from tokenflow.actors.supervisor import Supervisor
from tokenflow.actors.suspects import DEADLY, deadly, isolate
from tokenflow.dsl.ir import ModelIR, RecipeIR
from tokenflow.dsl.messages import PeerReq
from tokenflow.errors import ProtocolError, RouteFailed, TokenflowError, WorkerDied, rebuild
from tokenflow.types import FinishReason
from tokenflow.wire.messages import RowDone, Step, StepDone

_PATIENCE_STEPS = 20
_DROP_DELAY_S = 0.02
_ENDLESS_ROLLBACKS = 16
"""So many times what may be tentative is taken back, and nothing becomes final: then it never will."""


class System(Protocol):
    """What an actor asks of the system it lives in."""

    def allows(self, sequence: Sequence, code: int) -> bool:
        """Whether model ``code`` is there and may write one more token of a request."""

    def home(self, sequence: Sequence) -> int:
        """The model that a request comes back to where it may not stay.

        :raises WorkerDied: if none that is left may go on with it.
        """

    def deliver(self, sender: int, peer: int, sequence: Sequence, request: PeerReq) -> None:
        """Pass a hand-off from the actor of model ``sender`` to that of model ``peer``."""

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Take back all but the first ``length`` tokens of a request, everywhere."""

    def grew(self, sequence: Sequence) -> bool:
        """A token was committed: account for it; answers whether the request is still active."""

    def reserve(self, sequence: Sequence) -> None:
        """Book memory for tokens that a request may get unseen."""

    def finish(
        self, sequence: Sequence, reason: FinishReason | None = None, error: TokenflowError | None = None
    ) -> None:
        """The request is over."""

    def slowest_step_s(self) -> float:
        """Typical duration of the slowest model's step."""

    def observe(self, model: str, step: Step, done: StepDone) -> None:
        """A step was run."""


class ModelActor:
    """Runs one model of a recipe for every request that comes to it."""

    def __init__(
        self,
        recipe: RecipeIR,
        model: ModelIR,
        supervisor: Supervisor,
        system: System,
        batching: Batching,
        slots: int,
    ) -> None:
        self.model = model
        self.supervisor = supervisor
        self.counters = Counters()
        self._recipe = recipe
        self._handoffs = Handoffs(recipe, model)
        self._system = system
        self._batching = batching
        self._slots = slots
        self._mailbox: Mailbox[Sequence] = Mailbox(partial(batching.hold_s, model.code), self._patience_s)
        self._news: list[Sequence] = []
        self._run: list[tuple[Step, StepDone, float]] = []
        self._held = Held(model)
        self._running: frozenset[int] = frozenset()
        self._verifier = recipe.model(recipe.verifier).code if recipe.verifier else 0
        may = not (recipe.rollback or recipe.budgets)
        self._leash = Leash(may, partial(batching.free, model.code))

    def holds(self, sequence: Sequence) -> bool:
        """Whether the worker has KV cache of a request."""
        return sequence in self._held

    def admit(self, sequence: Sequence) -> None:
        """Take a new request, or one that is rebuilt here: its prefill never waits for a threshold."""
        self._put(sequence, urgent=True)

    def receive(self, sender: int, sequence: Sequence, request: PeerReq) -> None:
        """Take a request over from model ``sender``; by default every token that it brings is accepted."""
        if request.loc != len(sequence.tokens):
            raise ProtocolError(
                f"model {self.model.name!r} got {request.loc} tokens of request {sequence.id}, "
                f"which has {len(sequence.tokens)}"
            )
        try:
            kept = self._handoffs.receive(sequence, request, sender)
        except RouteFailed as error:
            self._system.finish(sequence, error=handoff_failed(sequence, self._held.steps, error))
            return
        if kept < len(sequence.tokens):
            self._take_back(sequence, kept)
            if (self.model.code, sequence.output_tokens) in sequence.gave_up:
                self._system.finish(sequence, error=livelock(self._recipe, sequence, sender, self.model.code))
                return
            if sequence.taken_back > _ENDLESS_ROLLBACKS * sequence.rollback:
                self._system.finish(sequence, error=no_progress(self._recipe, sequence, self.model.name))
                return
        if self._system.grew(sequence):
            self._put(sequence)

    def _put(self, sequence: Sequence, *, urgent: bool = False) -> None:
        self._mailbox.put(sequence, urgent=urgent)
        self._leash.pull()

    def forget(self, sequence: Sequence) -> None:
        """The request is over or is rebuilt: nothing of it shall stay here."""
        self._mailbox.discard(sequence)
        if sequence in self._held:
            if not self._held.to_drop:
                asyncio.get_running_loop().call_later(_DROP_DELAY_S, self._flush)
            self._held.drop(sequence)
            self._leash.pull()

    def _flush(self) -> None:
        """Drops travel with the next batch; where none comes, they go alone."""
        if self._held.to_drop:
            self._mailbox.poke()

    async def gone(self, sequence: Sequence) -> None:
        """Wait until the worker holds nothing of a request that is over."""
        await self._held.gone(sequence)

    def rewind(self, sequence: Sequence, length: int) -> None:
        """The request is only ``length`` tokens long again."""
        self._held.truncate(sequence, length)

    @property
    def waiting(self) -> int:
        """How many requests are ready for the next batch."""
        return len(self._mailbox)

    @property
    def threshold(self) -> int:
        """B: how many requests the next batch waits for."""
        return self._batching.threshold(self.model.code)

    def reconsider(self) -> None:
        """See whether the next batch may start now, and whether it may at all."""
        self._mailbox.reconsider()
        self._leash.pull()

    async def decode_loop(self) -> None:
        """Run batches on the model's worker, and on the next when that one dies, until it is given up."""
        with contextlib.suppress(TokenflowError):
            while True:
                worker = await self.supervisor.ready()
                try:
                    await self._serve(worker)
                finally:
                    self._held.clear()

    async def _serve(self, worker: WorkerProcess) -> None:
        """Take a batch, run it, settle what came of it, as long as the worker lives; it holds nothing yet.

        Those who wait for tokens are told while the worker computes the next batch, or at once if there
        is none: their text is not on the path of the tokens.
        """
        loop = asyncio.get_running_loop()
        while True:
            batch, others = isolate(await self._mailbox.take(self._slots), worker.steps)
            self._put_back(others)
            if worker.error is not None:  # it died while nobody asked for anything: of nobody's request
                self._put_back(batch)
                return
            step = self._held.step(batch, *self._leash.let(batch, alone=not len(self._mailbox)))
            by_handle = {sequence.id: sequence for sequence in batch}
            answer = worker.step(step)
            self._leash.began(worker.hold)
            while True:
                self._batching.began(self.model.code, len(step.rows))
                sent = time.monotonic()
                try:
                    done = await answer
                    # A step that the worker began by itself may have ended before its turn came here.
                    seconds = max(time.monotonic() - sent, done.ended - done.started)
                    check_answer(self.model, self._recipe, by_handle, step, done)
                except TokenflowError as error:
                    await worker.fail(error)
                    self._ended()
                    self._lost(by_handle, step, error)
                    return
                self._held.answered()
                if not done.ahead:
                    self._ended()
                self._settle_all(by_handle, done)
                self._run.append((step, done, seconds))
                # After the next step of this model, and after the peers have had their turn.
                loop.call_soon(self._tell)
                if not done.ahead:
                    break
                answer = worker.ahead()
                step = self._held.went_on(step, done)
                by_handle = {handle: by_handle[handle] for handle in done.ahead}

    def _ended(self) -> None:
        self._batching.ended(self.model.code)
        self._leash.ended()

    def _put_back(self, batch: list[Sequence]) -> None:
        for sequence in batch:
            self._mailbox.put(sequence, urgent=True)

    def _lost(self, batch: dict[int, Sequence], step: Step, error: TokenflowError) -> None:
        """The worker died during a step: its requests run again, from what is committed of them."""
        for row in step.rows:
            sequence = batch[row.handle]
            if not sequence.runs(self.model.code, row.epoch):
                continue
            sequence.deaths += 1
            if len(batch) == 1 and sequence.deaths >= DEADLY:
                self._system.finish(sequence, error=deadly(sequence, self.model.name, error))
            else:
                self._mailbox.put(sequence, urgent=True)

    def _tell(self) -> None:
        """What need not happen between a reply and the next step."""
        run, self._run = self._run, []
        for step, done, seconds in run:
            self.counters.count(done)
            self._leash.saw(done.rows)
            self._batching.ran(self.model.code, step, done, seconds)
            self._system.observe(self.model.name, step, done)
        news, self._news = self._news, []
        for sequence in news:
            sequence.listener.wake(sequence)
            if self._leash.worthwhile:
                self._system.reserve(sequence)

    def _patience_s(self) -> float:
        return _PATIENCE_STEPS * self._system.slowest_step_s()

    def _settle_all(self, batch: dict[int, Sequence], done: StepDone) -> None:
        """Turn a reply into commits and hand-offs; what is stale by now is ignored."""
        for failed in done.failed:
            sequence = batch[failed.handle]
            if sequence.runs(self.model.code, failed.epoch):
                self._system.finish(sequence, error=rebuild(failed.kind, failed.message))
        self._running = frozenset(done.ahead)
        for row in done.rows:
            sequence = batch[row.handle]
            if not sequence.runs(self.model.code, row.epoch):
                continue
            sequence.deaths = 0
            if row.token < 0:
                self._mailbox.put(sequence, urgent=True)
                continue
            if row.state:
                sequence.states[self.model.code] = row.state
            if row.position < len(sequence.tokens):
                self._take_back(sequence, row.position)
                # This model's worker has taken them back already.
                self._held.truncated(sequence, row.position)
            final = sequence.final
            reason = sequence.confirm() if self.model.config.verify else None
            if reason is not None:
                self._system.finish(sequence, reason)
                continue
            self._settle(sequence, row)
            to = sequence.holder if sequence.phase is Phase.ACTIVE else None
            self._batching.moved(self.model.code, to, sequence.final - final)
        self._news.extend(batch.values())

    def _take_back(self, sequence: Sequence, length: int) -> None:
        sequence.dropped += len(sequence.tokens) - length
        self._system.rewind(sequence, length)

    def _settle(self, sequence: Sequence, row: RowDone) -> None:
        """The order after each decode step: stay and commit, or send, and commit if the token was kept."""
        here = self.model.code
        peer = row.destination or here
        if peer == here or not self._system.allows(sequence, peer):
            if not self._commit(sequence, row):
                return
            if self._must_be_checked(sequence):
                self._hand_all_over(sequence, self._verifier)
            elif not self._system.allows(sequence, here):
                self._go_home(sequence)
            elif self._system.grew(sequence) and sequence.id not in self._running:
                self._put(sequence)
            return
        try:
            request = self._handoffs.send(sequence, row, peer)
        except RouteFailed as error:
            self._system.finish(sequence, error=handoff_failed(sequence, self._held.steps, error))
            return
        if request.loc <= len(sequence.tokens):
            sequence.dropped += 1
            gives_up = here, sequence.output_tokens
            if gives_up in sequence.gave_up:
                self._system.finish(sequence, error=livelock(self._recipe, sequence, peer, here))
                return
            sequence.gave_up.add(gives_up)
        elif not self._commit(sequence, row):
            return
        if peer != self._verifier and self._must_be_checked(sequence):
            self._hand_all_over(sequence, self._verifier, request)
        else:
            self._hand_over(sequence, peer, request)

    def _must_be_checked(self, sequence: Sequence) -> bool:
        """Whether no token may be written any more before the model that checks has seen those there are."""
        code = self._verifier
        return code > 0 and sequence.window_full and self._system.allows(sequence, code)

    def _go_home(self, sequence: Sequence) -> None:
        try:
            home = self._system.home(sequence)
        except WorkerDied as error:
            self._system.finish(sequence, error=error)
            return
        self._hand_all_over(sequence, home)

    def _hand_all_over(self, sequence: Sequence, peer: int, said: PeerReq | None = None) -> None:
        """Hand over what may not stay here; ``said`` is what the model's ``send`` has said already."""
        try:
            request = self._handoffs.send_all(sequence, peer, said)
        except RouteFailed as error:
            self._system.finish(sequence, error=handoff_failed(sequence, self._held.steps, error))
            return
        self._hand_over(sequence, peer, request)

    def _hand_over(self, sequence: Sequence, peer: int, request: PeerReq) -> None:
        if (peer, sequence.output_tokens) in sequence.gave_up:
            self._system.finish(sequence, error=livelock(self._recipe, sequence, self.model.code, peer))
            return
        sequence.move(peer)
        self._system.deliver(self.model.code, peer, sequence, request)

    def _commit(self, sequence: Sequence, row: RowDone) -> bool:
        """Commit a token; answers whether the response goes on."""
        self.counters.committed_tokens += 1
        reason = sequence.commit(self.model.code, row, final=self.model.config.verify)
        if reason is not None:
            self._system.finish(sequence, reason)
        return reason is None
