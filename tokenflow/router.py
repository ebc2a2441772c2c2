"""The public API: a router runs one recipe and answers requests."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from tokenflow.actors.admission import QueueLimits
from tokenflow.actors.fork import Owner
from tokenflow.actors.sequence import Limits
from tokenflow.actors.sequence import Sequence as Request
from tokenflow.actors.steps import StepEnd, step_end
from tokenflow.actors.system import ActorSystem, Observer
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.recipe import Recipe
from tokenflow.dsl.weights import first_writer
from tokenflow.errors import RouterClosed, TokenflowError
from tokenflow.members import Members, load_members
from tokenflow.prompts import (
    Prompt,
    check_endpoints,
    check_known_ids,
    check_many,
    check_timeout,
    check_top,
    encode,
    is_long,
    param_values,
    sampling_params,
)
from tokenflow.random import DRAW, uniform
from tokenflow.response import Reader, Response, scored_tokens
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.types import Completion, Load, Reservation, RouterStatus, SamplingParams, Token

if TYPE_CHECKING:
    from tokenflow.planner import Lookahead, RoutingModel, Thresholds

_STOP_GRACE_S = 5.0
_READERS = 4
"""Threads that make tokens of long prompts, so that nobody else's tokens wait for them; each needs memory."""
_LONG_PROMPT = 4_000
"""Tokens from which a scored prompt is put together in a thread."""


class Router:
    """Runs a recipe: its models load on entering the context and stop on leaving it.

    ::

        async with Router("recipes/demo.yaml") as router:
            completion = await router.generate("Q: 93*7=?\\nA: ", max_tokens=200)

    :param recipe: a recipe file, in YAML or in Python (which calls its :class:`tokenflow.Recipe` ``recipe``);
        a mapping shaped as one in YAML; a :class:`tokenflow.Recipe`; or a compiled recipe.
    :param overrides: ``key.path=value`` strings applied to the recipe, as ``--set`` on the command line; a
        compiled recipe takes none.
    :param observer: called with every step a worker has run (model name, step, reply), for measurements.
    :param max_queued_requests: requests that may wait because they cannot begin yet; others are refused.
    :param max_queued_tokens: prompt tokens that the waiting requests may have together.
    :raises RecipeError: if the recipe is wrong; every problem is listed.
    """

    def __init__(
        self,
        recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe | RecipeIR,
        *,
        overrides: Sequence[str] = (),
        observer: Observer | None = None,
        max_queued_requests: int = 1024,
        max_queued_tokens: int = 2**20,
    ) -> None:
        if isinstance(overrides, str):
            raise TypeError("overrides is a list of 'key.path=value' strings, got one string")
        if isinstance(recipe, RecipeIR):
            if overrides:
                raise TypeError("a compiled recipe takes no overrides: give them when it is compiled")
            self.recipe = recipe
        else:
            from tokenflow.dsl.load import load_recipe

            self.recipe = load_recipe(recipe, overrides)
        self._observer = observer
        self._queue_limits = QueueLimits(max_queued_requests, max_queued_tokens)
        self._readers = anyio.CapacityLimiter(_READERS)
        self._ids = itertools.count(1)
        self._members: Members | None = None
        self._system: ActorSystem | None = None
        self._step_end: StepEnd | None = None
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Router:
        """Load every model the recipe can reach.

        :raises ModelLoadError: if a model cannot be found or loaded, or does not fit the others.
        :raises WorkerDied: if a worker process ends while loading.
        """
        if self._tasks is not None:
            raise RuntimeError("this router is running already; make another one, or leave this one first")
        members = await to_thread.run_sync(load_members, self.recipe, abandon_on_cancel=True)
        system = ActorSystem(
            members.recipe,
            members.vocab_limit,
            members.eos_token_ids,
            members.fingerprints,
            self._queue_limits,
            self._observer,
        )
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        try:
            await system.start(tasks)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await system.stop(grace_s=0)
            tasks.cancel_scope.cancel()
            await tasks.__aexit__(None, None, None)
            raise
        self._members, self._system, self._tasks = members, system, tasks
        self._owner = Owner()
        self._step_end = step_end(members.recipe)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._system is None or self._tasks is None or not self._owner.here:
            return None  # a process that was forked inside leaves to its parent what is its parent's
        with anyio.CancelScope(shield=True):
            # Somebody who leaves in a hurry (an error, Ctrl-C) does not wait for a batch to end.
            await self._system.stop(grace_s=_STOP_GRACE_S if kind is None else _STOP_GRACE_S / 5)
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        try:
            if isinstance(error, asyncio.CancelledError):
                return await tasks.__aexit__(kind, error, trace)
            await tasks.__aexit__(None, None, None)
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        return None

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that requests can come to, in recipe order."""
        return self.recipe.reachable()

    @property
    def tokenizer(self) -> Tokenizer:
        """What texts are read and written with; :raises RouterClosed: if the router is not running."""
        return self._running()[1].tokenizer

    @property
    def chat_tokenizer(self) -> Tokenizer:
        """What conversations are written with; :raises RouterClosed: if the router is not running."""
        return self._running()[1].chat

    @property
    def status(self) -> RouterStatus:
        """What the router is doing, and has done; :raises RouterClosed: if it is not running."""
        return self._running()[0].status

    @property
    def load(self) -> Load:
        """How busy the router is; :raises RouterClosed: if it is not running."""
        return self._running()[0].load

    @property
    def down(self) -> TokenflowError | None:
        """Why nothing can be answered: the router is not running, or a model's worker is gone for good."""
        if self._system is None:
            return RouterClosed("the router is not running")
        return self._system.error

    async def generate(
        self,
        prompt: Prompt,
        *,
        params: Mapping[str, float] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (of the request, which ends by itself)
        member: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """The whole response to a prompt.  Cancelling the caller cancels the request on every model.

        :param params: values for the recipe's parameters, for this request only.
        :param timeout: seconds that the response may take, the time in the queue included.
        :param member: let this model write all of it, whatever the recipe says.
        :param sampling: fields of :class:`tokenflow.types.SamplingParams` (``stop`` may be one string); what
            is not given is as the recipe says.
        :raises InvalidRequest: if the prompt, a parameter or a sampling value is wrong.
        :raises ContextTooLong: if prompt and ``max_tokens`` exceed the recipe's smallest context or KV cache.
        :raises Overloaded: if too many requests wait already.
        :raises RequestTimeout: if the response took longer than ``timeout``.
        :raises DeadlyRequest: if worker after worker died while it ran the request.
        :raises RequestError: if this request failed on the way.
        :raises RouterClosed: if the router is not running.
        """
        async with self.stream(prompt, params=params, timeout=timeout, member=member, **sampling) as response:
            return await response.completion()

    def stream(
        self,
        prompt: Prompt,
        *,
        params: Mapping[str, float] | None = None,
        timeout: float | None = None,
        member: str | None = None,
        reservation: Reservation | None = None,
        **sampling: Any,
    ) -> Response:
        """The response as it grows: ``async for event in router.stream(...)``.

        Takes and raises what :meth:`generate` does, a wrong prompt at the first event.  Breaking out of
        the loop and dropping the response, or leaving ``async with router.stream(...)``, cancels it.

        :param reservation: what :meth:`reserve` gave: a place of it is taken instead of a new one.
        """
        system, members = self._running()
        settings = sampling_params(sampling, self.recipe.sampling)
        values = param_values(self.recipe.params, params)
        check_timeout(timeout)
        only = members.model(member).code if member is not None else 0
        return Response(system, partial(self._open, prompt, settings, values, only, timeout), reservation)

    def reserve(self, requests: int = 1) -> AbstractContextManager[Reservation]:
        """Places in the queue for responses that belong together, all or none, to be taken inside ``with``.

        :raises Overloaded: if too many requests wait already.
        :raises RouterClosed: if the router is not running.
        """
        return self._running()[0].admission.reserve(requests)

    async def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        template: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a prompt: what the models of the recipe get for it.

        :param add_special_tokens: put before a text what its model expects there.
        :param template: variables for the chat template, ``{"enable_thinking": False}`` say.
        :param most: refuse a prompt of more tokens.
        :raises InvalidRequest: if the prompt is wrong.
        :raises RouterClosed: if the router is not running.
        """
        _, members = self._running()
        work = partial(
            encode,
            prompt,
            members.tokenizer,
            members.vocab_limit,
            chat=members.chat,
            add_special_tokens=add_special_tokens,
            template=template,
            most=most,
        )
        if is_long(prompt):
            return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._readers)
        return work()

    async def score(self, prompt: Prompt, *, top: int = 0, member: str | None = None) -> tuple[Token, ...]:
        """The tokens of a prompt with their log-probabilities; the first one has none.

        :param top: report this many alternatives per token as well; at most 20.
        :param member: the model that scores; without one, the recipe's ``scorer``, or its only model.
        :raises InvalidRequest: if the prompt is wrong, or no model is named.
        :raises ContextTooLong: if the prompt exceeds the recipe's smallest context or KV cache.
        :raises EngineError: if the model's engine cannot score it.
        :raises RouterClosed: if the router is not running.
        """
        system, members = self._running()
        system.require_running()
        check_top(top)
        scorer = members.scorer(member)
        tokens = await self.encode(prompt, most=system.longest)
        scored = (
            await system.scoring.score(system.actors[scorer.code], tokens, top) if len(tokens) > 1 else None
        )
        work = partial(scored_tokens, members.tokenizer, scorer.name, tokens, scored)
        return await to_thread.run_sync(work) if len(tokens) > _LONG_PROMPT else work()

    async def generate_many(
        self, prompts: Iterable[Prompt], *, concurrency: int = 16, **request: Any
    ) -> list[Completion]:
        """Responses to many prompts, in their order, ``concurrency`` at a time.

        ``request`` is what :meth:`generate` takes beside the prompt.  The first failure cancels the rest
        and is raised.
        """
        check_many(prompts, concurrency)
        done: dict[int, Completion] = {}
        todo = iter(enumerate(prompts))

        async def work() -> None:
            for index, prompt in todo:
                done[index] = await self.generate(prompt, **request)

        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(concurrency):
                    tasks.start_soon(work)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [done[index] for index in range(len(done))]

    @property
    def start_policy(self) -> Thresholds | Lookahead:
        """When batches start now: thresholds by model in recipe order, and whether models look ahead.

        :raises RouterClosed: if the router is not running.
        """
        return self._running()[0].batching.policy

    def routing_model(self) -> RoutingModel:
        """Where steps led lately and how long they took: what batches are planned with.

        :raises RouterClosed: if the router is not running.
        :raises PlanError: if too few steps were run to tell.
        """
        meter = self._running()[0].batching.meter
        meter.fold()
        return meter.model()

    def _running(self) -> tuple[ActorSystem, Members]:
        if self._system is None or self._members is None:
            raise RouterClosed("the router is not running: use it inside 'async with Router(...) as router'")
        return self._system, self._members

    async def _open(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        params: tuple[float, ...],
        only: int,
        timeout_s: float | None,
    ) -> tuple[Request, Reader]:
        system, members = self._running()
        system.require_running()
        tokens = await self.encode(prompt, most=system.longest)
        check_known_ids(sampling, members.vocab_limit)
        names = [model.name for model in self.recipe.models if only in (0, model.code)]
        check_endpoints(sampling, {n: e for n, e in members.endpoints.items() if n in names})
        limits = Limits.within(system.longest, len(tokens), sampling, members.eos_token_ids, timeout_s)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        reader = Reader(members.tokenizer, sampling)
        request = Request(
            id=next(self._ids),
            tokens=tokens,
            sampling=sampling,
            seed=seed,
            params=params,
            limits=limits,
            listener=reader,
            holder=only or self._first(seed, sampling.choice, params),
            rollback=0 if only else self.recipe.rollback,
            only=only,
            step_end=None if only else self._step_end,
        )
        return request, reader

    def _first(self, seed: int, choice: int, params: tuple[float, ...]) -> int:
        """Code of the model that writes the first token; in an ensemble it is drawn as all others are."""
        values = dict(zip(self.recipe.params, params, strict=True))
        return self.recipe.model(first_writer(self.recipe, values, uniform(seed, choice, 0, 0, DRAW))).code
