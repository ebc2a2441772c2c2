"""From a checked request to its answer: responses are prepared, followed and written."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response as Answer

from tokenflow.errors import InvalidRequest
from tokenflow.response import Response
from tokenflow.server.errors import invalid
from tokenflow.server.records import record_of
from tokenflow.server.service import LONG, Service
from tokenflow.server.transport import Events, EventStream, Json, sole, unless_gone
from tokenflow.types import Completion, Reservation, StreamEvent

T = TypeVar("T")

MOST_RESPONSES = 1024
_WORDS = frozenset(("prompt", "template"))
"""Settings whose names mean the same thing to everybody in a message."""
_SEED_BITS = 53
"""More than these of a number are lost on clients that read JSON's numbers as floats."""
_AT_ONCE = 16
"""Responses prepared before others get a turn."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One response to be written: token ids of its prompt, and settings of :class:`SamplingParams`."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any]


def choices(service: Service, prompt: Sequence[int], sampling: Mapping[str, Any], n: int) -> list[Wish]:
    """``n`` responses to a prompt.

    They have one seed, which is drawn if neither the request nor the recipe gives one: whoever asks again
    with it gets all of them again.
    """
    if sampling["seed"] is None and service.router.recipe.sampling.get("seed") is None:
        sampling = {**sampling, "seed": secrets.randbits(_SEED_BITS)}
    return [Wish(prompt, {**sampling, "choice": choice}) for choice in range(n)]


class Shape(Protocol):
    """How an endpoint writes answers; an object for each request."""

    def events(self, index: int, event: StreamEvent) -> bytes:
        """What a stream says of news of response ``index``: server-sent events."""

    def last(self, completions: Sequence[Completion]) -> bytes:
        """What a stream says at its end, or nothing."""

    def whole(self, completions: Sequence[Completion]) -> object:
        """The answer that is not streamed, as plain data."""


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about settings name them as the client does.

    :param names: what the client's request calls the settings of a router.
    """
    try:
        yield
    except InvalidRequest as error:
        if error.param is None or error.param not in names:
            raise
        theirs = {ours: name for ours, name in names.items() if ours not in _WORDS}
        rule, got, value = str(error).partition(", got ")
        rule = re.sub(r"\w+", lambda word: theirs.get(word[0], word[0]), rule)
        raise type(error)(rule + got + value, names[error.param]) from None


async def prepare(
    service: Service,
    reservation: Reservation,
    wishes: Sequence[Wish],
    member: str | None,
    params: Mapping[str, float] | None,
) -> list[Response]:
    """Check every response that is wished for, and queue it; of all or none.

    :param reservation: a place for each.
    :raises TokenflowError: if one of them is wrong, or nothing can be answered.
    """
    responses: list[Response] = []
    try:
        async for wish in paced(wishes):
            response = service.router.stream(
                wish.prompt,
                params=params,
                timeout=service.request_timeout,
                member=member,
                reservation=reservation,
                **wish.sampling,
            )
            responses.append(response)
            await response.begin()
    except BaseException:
        for response in responses:
            response.close()
        raise
    return responses


async def answer(
    service: Service, request: Request, responses: Sequence[Response], shape: Shape, stream: bool
) -> Answer:
    """The answer to a request, streamed or whole.

    :raises TokenflowError: if a response that is not streamed fails.
    :raises ClientGone: if the client left.
    """
    record = record_of(request)

    def finished(completions: Sequence[Completion]) -> None:
        record.completions = completions
        for completion in completions:
            service.metrics.finished(completion)

    if not stream:
        completions = await unless_gone(request.receive, partial(_complete, responses))
        finished(completions)
        work = partial(_encoded, shape, completions)
        tokens = sum(done.usage.completion_tokens for done in completions)
        return Json(await service.aside(work) if tokens > LONG else work())

    async def feed(events: Events) -> None:
        completions = await _follow(service, responses, shape, events)
        finished(completions)
        await events.end(shape.last(completions))

    return EventStream(feed, service.error, service.metrics.aborted)


def _encoded(shape: Shape, completions: Sequence[Completion]) -> bytes:
    return msgspec.json.encode(shape.whole(completions))


async def _complete(responses: Sequence[Response]) -> list[Completion]:
    done: dict[int, Completion] = {}

    async def complete(index: int, response: Response) -> None:
        async with response:
            done[index] = await response.completion()

    await _each(responses, complete)
    return [done[index] for index in range(len(done))]


async def _follow(
    service: Service, responses: Sequence[Response], shape: Shape, events: Events
) -> list[Completion]:
    """Stream every response as it grows."""
    done: dict[int, Completion] = {}

    async def follow(index: int, response: Response) -> None:
        before = 0.0

        def tell(event: StreamEvent) -> None:
            nonlocal before
            events.write(shape.events(index, event))
            now = time.monotonic()
            if before and event.tokens:
                service.metrics.streamed(now - before, len(event.tokens))
            before = now
            if event.completion is not None:
                done[index] = event.completion

        async with response:
            first = await anext(response)
            await events.begin()
            tell(first)
            while await response.pour(tell, events.ready):
                await events.drained()

    await _each(responses, follow)
    return [done[index] for index in range(len(done))]


async def _each(
    responses: Sequence[Response], work: Callable[[int, Response], Coroutine[Any, Any, None]]
) -> None:
    """Work on all responses at once; the first failure cancels the others and is raised."""
    if len(responses) == 1:
        await work(0, responses[0])
        return
    try:
        async with anyio.create_task_group() as tasks:
            for index, response in enumerate(responses):
                tasks.start_soon(work, index, response)
    except BaseExceptionGroup as group:
        raise sole(group) from None


async def paced(items: Sequence[T]) -> AsyncIterator[T]:
    """The items, with a turn for others before them and now and then.

    The first turn is of those who came at the same time: whom there is no room for is told so before
    anybody's work begins.
    """
    for index, item in enumerate(items):
        if index % _AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item


def check_count(count: int, param: str) -> None:
    """:raises ApiError: if one request asks for no, or too many responses."""
    if not 1 <= count <= MOST_RESPONSES:
        raise invalid(f"a request can have 1 to {MOST_RESPONSES} responses, got {count}", param)
