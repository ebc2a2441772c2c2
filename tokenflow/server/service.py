"""What the endpoints of one server share: the router, its names, admission, and whether it serves."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TypeVar

import anyio
from anyio import to_thread

from tokenflow.dsl.ir import RecipeIR
from tokenflow.errors import Overloaded, RequestError, TokenflowError
from tokenflow.router import Router
from tokenflow.server.errors import (
    ApiError,
    api_error,
    model_down,
    no_model,
    not_ready,
    worker_died,
)
from tokenflow.server.logprobs import Speller
from tokenflow.server.metrics import Metrics
from tokenflow.types import Reservation

T = TypeVar("T")

LONG = 4_000
"""Tokens with which an answer is work: more than a few milliseconds."""


class State(enum.Enum):
    """Whether a server takes requests."""

    STARTING = "the models are loading"
    SERVING = "serving"
    DRAINING = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Target:
    """Who answers: ``name`` is what clients call it, ``member`` the one model that does, or None for all."""

    name: str
    member: str | None


class Service:
    """One recipe as clients see it.

    :param recipe: what answers.
    :param names: what clients call the recipe; the first is reported.
    :param api_keys: any of them opens the endpoints that make tokens; none leaves them open.
    :param max_queued: so many requests may wait until one can begin.
    :param request_timeout: seconds that a response may take, the time in the queue included.
    """

    def __init__(
        self,
        recipe: RecipeIR,
        *,
        names: tuple[str, ...] = (),
        api_keys: tuple[str, ...] = (),
        max_queued: int = 256,
        request_timeout: float | None = None,
        access_log: bool = False,
    ) -> None:
        self.names = names or (recipe.name,)
        self.api_keys = api_keys
        self.request_timeout = request_timeout
        self.access_log = access_log
        self.metrics = Metrics(recipe, self.names[0])
        self.router = Router(recipe, observer=self.metrics.step, max_queued_requests=max_queued)
        self.state = State.STARTING
        self.created = int(time.time())
        self.open = 0
        """Requests for tokens that are not answered yet."""
        self._idle = anyio.Event()
        self._reading: set[anyio.CancelScope] = set()
        self._aside = anyio.CapacityLimiter(1)
        self._longest: int | None = None
        self.verifying = frozenset(model.name for model in recipe.models if model.config.verify)
        """Models that check drafts."""
        self._spellers: dict[bool, Speller] = {}

    def enter(self) -> None:
        """A request for tokens has come."""
        self.open += 1

    def leave(self) -> None:
        """A request for tokens is over."""
        self.open -= 1
        if not self.open:
            self._idle.set()

    async def until_idle(self) -> None:
        """Wait until no request for tokens is open."""
        self._idle = anyio.Event()
        if self.open:
            await self._idle.wait()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While this reads what a client sends, the server may stop waiting for it.

        :raises ApiError: if it did.
        """
        with anyio.CancelScope() as scope:
            self._reading.add(scope)
            try:
                yield
            finally:
                self._reading.discard(scope)
        if scope.cancelled_caught:
            raise not_ready(self.state.value)

    def stop_reading(self) -> None:
        """Wait for nothing that clients have begun to send."""
        for scope in self._reading:
            scope.cancel()

    @property
    def targets(self) -> list[Target]:
        """The recipe by each of its names, then its models."""
        recipes = [Target(name, None) for name in self.names]
        return recipes + [
            Target(f"{name}/{model}", model) for name in self.names for model in self.router.models
        ]

    def target(self, name: str | None) -> Target:
        """Who answers for a name; the recipe, if none is given.

        :raises ApiError: if nobody is called that.
        """
        if not name:
            return Target(self.names[0], None)
        for target in self.targets:
            if target.name == name:
                return target
        raise no_model(name, tuple(target.name for target in self.targets))

    @property
    def version(self) -> str:
        """Of the package."""
        return version("tokenflow")

    @property
    def longest(self) -> int | None:
        """Most tokens (prompt and output) of a request; unknown while the models load."""
        if self._longest is None and self.state is not State.STARTING:
            self._longest = self.router.status.longest
        return self._longest

    def root_of(self, member: str | None) -> str:
        """Where a model, or the one that reads prompts, is found: a directory or a hub id; a simulated model,
        which is nowhere, has its engine's name."""
        recipe = self.router.recipe
        config = recipe.model(member or recipe.entry).config
        return config.path or config.engine

    def exposition(self) -> bytes:
        """The metrics in Prometheus's text format."""
        running = self.state is not State.STARTING
        return self.metrics.expose(self.router.status if running else None)

    async def aside(self, work: Callable[[], T]) -> T:
        """Do in a thread what would keep everybody's tokens waiting.

        One at a time: each may hold the interpreter for some milliseconds whenever the event loop wants it.
        """
        return await to_thread.run_sync(work, limiter=self._aside)

    async def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids.

        :param special: special tokens show as they are spelled.
        :raises ValueError: for an id that the tokenizer does not have.
        """
        work = partial(self.router.tokenizer.decode, ids, skip_special_tokens=not special)
        return await self.aside(work) if len(ids) > LONG else work()

    def speller(self, *, as_ids: bool = False) -> Speller:
        """How single tokens are written."""
        if as_ids not in self._spellers:
            self._spellers[as_ids] = Speller(self.router.tokenizer, as_ids)
        return self._spellers[as_ids]

    def require_serving(self) -> None:
        """:raises ApiError: if no request is taken now: loading, draining, or a model is gone."""
        if self.state is not State.SERVING:
            raise not_ready(self.state.value)
        self._require_models()

    def _require_models(self) -> None:
        if (error := self.router.down) is not None:
            raise model_down(error) if self.state is State.SERVING else not_ready(self.state.value)

    @contextmanager
    def reserve(self, responses: int) -> Iterator[Reservation]:
        """Places for responses whose prompts are yet to be read; what was taken before a drain may have them.

        :raises ApiError: if the models are gone.
        :raises Overloaded: if as many requests wait as may.
        """
        self._require_models()
        with self.router.reserve(responses) as reservation:
            yield reservation

    def require_room(self) -> None:
        """:raises Overloaded: if as many requests wait as may."""
        with self.router.reserve():
            pass

    def error(self, error: Exception) -> ApiError:
        """What a client is told of an error."""
        told = api_error(error)
        if isinstance(error, Overloaded):
            self.metrics.rejected(told.code)
        if isinstance(error, TokenflowError) and not isinstance(error, RequestError):
            if self.state is not State.SERVING:
                told = not_ready(self.state.value)
            elif self.router.down is not None:
                told = worker_died(error)
        self.metrics.failed(told.code)
        return told
