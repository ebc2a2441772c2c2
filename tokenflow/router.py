"""The public API: a router runs one recipe and answers requests."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from tokenflow.actors.sequence import Limits
from tokenflow.actors.sequence import Sequence as Request
from tokenflow.actors.steps import StepEnd, step_end
from tokenflow.actors.system import ActorSystem, Observer
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.recipe import Recipe
from tokenflow.dsl.weights import first_writer
from tokenflow.errors import ContextTooLong, InvalidRequest, RouterClosed
from tokenflow.members import Members, load_members
from tokenflow.prompts import Prompt, check_endpoints, check_known_ids, encode, param_values, sampling_params
from tokenflow.random import DRAW, uniform
from tokenflow.response import Reader, Response
from tokenflow.types import Completion, SamplingParams

_STOP_GRACE_S = 5.0
_LONG_TEXT = 20_000
"""Characters from which a prompt is tokenized in a thread, so that nobody else's tokens wait for it."""


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
    :raises RecipeError: if the recipe is wrong; every problem is listed.
    """

    def __init__(
        self,
        recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe | RecipeIR,
        *,
        overrides: Sequence[str] = (),
        observer: Observer | None = None,
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
            members.recipe, members.vocab_limit, members.eos_token_ids, members.fingerprints, self._observer
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
        self._step_end = step_end(members.recipe)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._system is not None and self._tasks is not None
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

    async def generate(
        self, prompt: Prompt, *, params: Mapping[str, float] | None = None, **sampling: Any
    ) -> Completion:
        """The whole response to a prompt.  Cancelling the caller cancels the request on every model.

        :param params: values for the recipe's parameters, for this request only.
        :param sampling: fields of :class:`tokenflow.types.SamplingParams` (``stop`` may be one string).
        :raises InvalidRequest: if the prompt, a parameter or a sampling value is wrong.
        :raises ContextTooLong: if prompt and ``max_tokens`` exceed the recipe's smallest context or KV cache.
        :raises RequestError: if this request failed on the way.
        :raises RouterClosed: if the router is not running.
        """
        async with self.stream(prompt, params=params, **sampling) as response:
            return await response.completion()

    def stream(
        self, prompt: Prompt, *, params: Mapping[str, float] | None = None, **sampling: Any
    ) -> Response:
        """The response as it grows: ``async for event in router.stream(...)``.

        Takes and raises what :meth:`generate` does, a wrong prompt at the first event.  Breaking out of
        the loop and dropping the response, or leaving ``async with router.stream(...)``, cancels it.
        """
        if self._system is None or self._members is None:
            raise RouterClosed("the router is not running: use it inside 'async with Router(...) as router'")
        settings = sampling_params(sampling)
        values = param_values(self.recipe.params, params)
        return Response(self._system, partial(self._open, prompt, settings, values))

    async def generate_many(
        self, prompts: Iterable[Prompt], *, concurrency: int = 16, **request: Any
    ) -> list[Completion]:
        """Responses to many prompts, in their order, ``concurrency`` at a time.

        ``request`` is what :meth:`generate` takes beside the prompt.  The first failure cancels the rest
        and is raised.
        """
        if not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidRequest(
                f"concurrency must be an integer of at least 1, got {concurrency!r}", "concurrency"
            )
        if isinstance(prompts, str):
            raise InvalidRequest("generate_many takes a list of prompts, got one text", "prompts")
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

    async def _open(
        self, prompt: Prompt, sampling: SamplingParams, params: tuple[float, ...]
    ) -> tuple[Request, Reader]:
        assert self._system is not None and self._members is not None
        members = self._members
        tokenizer = members.tokenizer
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            tokens = await to_thread.run_sync(
                encode, prompt, tokenizer, members.vocab_limit, abandon_on_cancel=True
            )
        else:
            tokens = encode(prompt, tokenizer, members.vocab_limit)
        check_known_ids(sampling, members.vocab_limit)
        check_endpoints(sampling, members.endpoints)
        limits = self._limits(len(tokens), sampling)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        reader = Reader(tokenizer, sampling.stop)
        request = Request(
            id=next(self._ids),
            tokens=tokens,
            sampling=sampling,
            seed=seed,
            params=params,
            limits=limits,
            listener=reader,
            holder=self._first(seed, sampling.choice, params),
            rollback=self.recipe.rollback,
            step_end=self._step_end,
        )
        return request, reader

    def _limits(self, prompt_tokens: int, sampling: SamplingParams) -> Limits:
        assert self._system is not None and self._members is not None
        longest = self._system.longest
        room = longest - prompt_tokens
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {prompt_tokens} tokens, but the recipe's smallest context or KV cache holds "
                f"{longest}, one of them for the response",
                "prompt",
            )
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            raise ContextTooLong(
                f"the prompt's {prompt_tokens} tokens and max_tokens {sampling.max_tokens} exceed the "
                f"recipe's smallest context or KV cache of {longest}; at most {room} tokens can follow",
                "max_tokens",
            )
        if sampling.min_tokens > room:
            raise ContextTooLong(
                f"min_tokens {sampling.min_tokens} exceeds what fits after the prompt, {room} tokens",
                "min_tokens",
            )
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self._members.eos_token_ids)
        return Limits(max_tokens=sampling.max_tokens or room, stop_ids=frozenset(stop_ids))

    def _first(self, seed: int, choice: int, params: tuple[float, ...]) -> int:
        """Code of the model that writes the first token; in an ensemble it is drawn as all others are."""
        values = dict(zip(self.recipe.params, params, strict=True))
        name = first_writer(self.recipe, values, uniform(seed, choice, 0, 0, DRAW))
        return self.recipe.model(name).code
