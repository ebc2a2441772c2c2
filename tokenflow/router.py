"""The public API: a router runs one recipe and answers requests."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, cast

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from tokenflow.actors.sequence import Limits
from tokenflow.actors.sequence import Sequence as Request
from tokenflow.actors.system import ActorSystem, Observer
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.weights import first_writer
from tokenflow.errors import ContextTooLong, InvalidRequest, RouterClosed
from tokenflow.members import Members, load_members
from tokenflow.random import DRAW, uniform
from tokenflow.response import Reader, Response
from tokenflow.types import Completion, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text as is, token ids, or chat messages (rendered with the entry model's chat template)."""

_STOP_GRACE_S = 5.0
_LONG_TEXT = 20_000
"""Characters from which a prompt is tokenized in a thread, so that nobody else's tokens wait for it."""


class Router:
    """Runs a recipe: its models load on entering the context and stop on leaving it.

    ::

        async with Router("recipes/demo.yaml") as router:
            completion = await router.generate("Q: 93*7=?\\nA: ", max_tokens=200)

    :param recipe: a recipe file, a mapping of the same shape, or a compiled recipe.
    :param overrides: ``key.path=value`` strings applied to the recipe, as ``--set`` on the command line.
    :param observer: called with every step a worker has run (model name, step, reply), for measurements.
    :raises RecipeError: if the recipe is wrong; every problem is listed.
    """

    def __init__(
        self,
        recipe: str | os.PathLike[str] | Mapping[str, Any] | RecipeIR,
        *,
        overrides: Sequence[str] = (),
        observer: Observer | None = None,
    ) -> None:
        if isinstance(recipe, RecipeIR):
            self.recipe = recipe
        else:
            from tokenflow.dsl.load import load_recipe

            self.recipe = load_recipe(recipe, overrides)
        self._observer = observer
        self._ids = itertools.count(1)
        self._members: Members | None = None
        self._system: ActorSystem | None = None
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Router:
        """Load every model the recipe can reach.

        :raises ModelLoadError: if a model cannot be found or loaded, or does not fit the others.
        :raises WorkerDied: if a worker process ends while loading.
        """
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
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._system is not None and self._tasks is not None
        with anyio.CancelScope(shield=True):
            # Somebody who leaves in a hurry (an error, Ctrl-C) does not wait for a batch to end.
            await self._system.stop(grace_s=_STOP_GRACE_S if kind is None else _STOP_GRACE_S / 5)
        self._tasks.cancel_scope.cancel()
        try:
            if isinstance(error, asyncio.CancelledError):
                return await self._tasks.__aexit__(kind, error, trace)
            await self._tasks.__aexit__(None, None, None)
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
        for name in ("stop", "stop_token_ids"):
            value = sampling.get(name, ())
            sampling[name] = (value,) if isinstance(value, str) else tuple(value or ())
        settings = SamplingParams(**sampling)
        values = self._param_values(params or {})
        return Response(self._system, partial(self._open, prompt, settings, values))

    async def generate_many(
        self, prompts: Iterable[Prompt], *, concurrency: int = 16, **request: Any
    ) -> list[Completion]:
        """Responses to many prompts, in their order, ``concurrency`` at a time.

        ``request`` is what :meth:`generate` takes beside the prompt.  The first failure cancels the rest
        and is raised.
        """
        if concurrency < 1:
            raise InvalidRequest(f"concurrency must be at least 1, got {concurrency}", "concurrency")
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
        tokens = await self._encode(prompt)
        self._check_ids(tokens)
        limits = self._limits(len(tokens), sampling)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        reader = Reader(self._members.tokenizers[self.recipe.entry], sampling.stop)
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
        )
        return request, reader

    async def _encode(self, prompt: Prompt) -> list[int]:
        assert self._members is not None
        tokenizer = self._members.tokenizers[self.recipe.entry]
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty; give at least one character", "prompt")
            if len(prompt) > _LONG_TEXT:
                return await to_thread.run_sync(tokenizer.encode, prompt, abandon_on_cancel=True)
            return tokenizer.encode(prompt)
        items = list(prompt)
        if not items:
            raise InvalidRequest("the prompt is empty; give at least one token or message", "prompt")
        if all(isinstance(item, Mapping) for item in items):
            return tokenizer.render(cast("list[Mapping[str, Any]]", items))
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return cast("list[int]", items)
        raise InvalidRequest(
            "a prompt is a text, a list of token ids or a list of chat messages, got a list with "
            f"{next(type(item).__name__ for item in items if not isinstance(item, int))} in it",
            "prompt",
        )

    def _check_ids(self, tokens: list[int]) -> None:
        assert self._members is not None
        limit = self._members.vocab_limit
        for index, token in enumerate(tokens):
            if not 0 <= token < limit:
                raise InvalidRequest(
                    f"token id {token} at index {index} is out of range: the tokenizer has {limit} ids",
                    "prompt",
                )

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
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self._members.eos_token_ids)
        return Limits(max_tokens=sampling.max_tokens or room, stop_ids=frozenset(stop_ids))

    def _first(self, seed: int, choice: int, params: tuple[float, ...]) -> int:
        """Code of the model that writes the first token; in an ensemble it is drawn as all others are."""
        values = dict(zip(self.recipe.params, params, strict=True))
        name = first_writer(self.recipe, values, uniform(seed, choice, 0, 0, DRAW))
        return self.recipe.model(name).code

    def _param_values(self, given: Mapping[str, float]) -> tuple[float, ...]:
        for name, value in given.items():
            if name not in self.recipe.params:
                known = ", ".join(self.recipe.params) or "none"
                raise InvalidRequest(
                    f"the recipe has no parameter {name!r}; it has: {known}", f"params.{name}"
                )
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise InvalidRequest(
                    f"parameter {name!r} must be a finite number, got {value!r}", f"params.{name}"
                )
        return tuple(float(given.get(name, default)) for name, default in self.recipe.params.items())
