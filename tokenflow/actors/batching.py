"""When the models of a system start their batches: the one place that sees all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from anyio.abc import TaskGroup

from tokenflow.actors.meter import Meter
from tokenflow.actors.planning import Planning
from tokenflow.actors.policies import Policies
from tokenflow.actors.poll import Poller
from tokenflow.actors.reach import Reach
from tokenflow.actors.scheduler import Scheduler
from tokenflow.actors.sequence import Sequence
from tokenflow.dsl.assume import assumed_model, unknown
from tokenflow.dsl.ir import RecipeIR
from tokenflow.planner.policy import Thresholds, eager
from tokenflow.wire.messages import Step, StepDone

if TYPE_CHECKING:
    from tokenflow.planner import Lookahead, PolicyTable, RoutingModel


class Queue(Protocol):
    """What it asks of an actor."""

    @property
    def waiting(self) -> int:
        """How many requests are ready for the next batch."""

    def reconsider(self) -> None:
        """See whether the next batch may start now."""


class Batching:
    """Follows the load, and answers every idle model whether its next batch may start.

    :param queues: the actors by model code, in recipe order; the system adds them once.
    :ivar meter: what is measured while serving.
    """

    def __init__(self, recipe: RecipeIR, queues: Mapping[int, Queue]) -> None:
        names = recipe.reachable()
        self._recipe = recipe
        self._queues = queues
        self._index = {recipe.model(name).code: index for index, name in enumerate(names)}
        self._reach = Reach(recipe)
        self._policies = Policies([recipe.batching.thresholds.get(name, 1) for name in names])
        self._scheduler = Scheduler(len(names), lambda: [queue.waiting for queue in queues.values()])
        self._poller: Poller | None = None
        self._load: tuple[int, tuple[int, ...]] = 0, (0,) * len(names)
        self._whole = True
        self._entry = names.index(recipe.entry)
        self.meter = Meter(names, self._entry)

    def start(self, tasks: TaskGroup, slots: int, poll: bool, spare: bool) -> None:
        """Follow the load from now on.

        :param slots: how many requests there can be.
        :param poll: keep the event loop awake while models compute.
        :param spare: whether there are cores that the models do not need.
        """
        policy = self._recipe.batching.policy
        self._poller = Poller(lambda: self._scheduler.busy) if poll else None
        self.meter.batch_limit = slots
        if policy in ("planned", "lookahead", "auto") and len(self._index) > 1:
            planning = Planning(
                policy, self.meter, self._assumed, lambda: self._load[0], slots, self._use, spare
            )
            tasks.start_soon(planning.run, name="planning")

    @property
    def policy(self) -> Thresholds | Lookahead:
        """The start policy that holds now."""
        return self._scheduler.policy

    def threshold(self, code: int) -> int:
        """B: how many requests model ``code`` waits for now."""
        return self.policy.thresholds[self._index[code]]

    def free(self, code: int, batch: int) -> tuple[int, float]:
        """With how many requests model ``code`` starts after a batch, and how often for certain."""
        return self.threshold(code), self._scheduler.free_steps(self._index[code], batch)

    def follow(self, active: Collection[Sequence], whole: bool) -> None:
        """The requests that are active have changed, or where they can still go.

        :param whole: whether every model has a worker; nobody waits for company that a dead one keeps away.
        """
        self._load = len(active), self._reach.counts(active)
        self._whole = whole
        self._decide()

    def handed_over(self, active: Collection[Sequence]) -> None:
        """A request went from one model to another."""
        if not self._reach.fixed:
            self.follow(active, self._whole)

    def hold_s(self, code: int) -> float:
        """How long idle model ``code`` had better wait: 0 to start now, infinite until something happens."""
        return self._scheduler.hold_s(self._index[code])

    def began(self, code: int, batch: int) -> None:
        """Model ``code`` was sent a step with so many requests."""
        self._scheduler.began(self._index[code], batch)
        if self._poller is not None:
            self._poller.start()
        self._look_again(code)

    def ended(self, code: int) -> None:
        """Model ``code`` is idle; its requests are about to be settled."""
        self._scheduler.ended(self._index[code])
        self._look_again(code)

    def _look_again(self, code: int) -> None:
        """What model ``code`` does lets others start, or wait."""
        if self._scheduler.looks_ahead:
            for other, queue in self._queues.items():
                if other != code:
                    queue.reconsider()

    def moved(self, code: int, to: int | None, tokens: int) -> None:
        """A step of model ``code`` made ``tokens`` of a request final, which goes on at model ``to``.

        Where it is over (None), another one takes its place, at the entry.
        """
        self.meter.moved(self._index[code], self._entry if to is None else self._index[to], tokens)

    def ran(self, code: int, step: Step, done: StepDone, seconds: float) -> None:
        """A step took so long, from its frame being sent to its reply being read; prefills do not count."""
        if done.rows and not step.open:
            self.meter.stepped(self._index[code], len(step.rows), seconds)

    def _assumed(self) -> RoutingModel | None:
        return None if unknown(self._recipe) else assumed_model(self._recipe)

    def _use(self, table: PolicyTable) -> None:
        self._policies.use(table)
        self._decide()

    def _decide(self) -> None:
        """Let the policy hold that fits the load; models that wait look again."""
        policy = self._policies.at(*self._load) if self._whole else eager(len(self._index))
        if policy != self._scheduler.policy:
            self._scheduler.policy = policy
            for queue in self._queues.values():
                queue.reconsider()
