"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response as Answer

from tokenflow.prompts import Prompt
from tokenflow.server.answers import ANY_TEXT, End, Extras, Mould, Ours, Usage, finish, ours, usage
from tokenflow.server.errors import invalid
from tokenflow.server.generation import answer, check_count, choices, paced, prepare, renamed
from tokenflow.server.logprobs import Offsets, Speller, text_logprobs
from tokenflow.server.reading import read
from tokenflow.server.records import record_of, service_of
from tokenflow.server.requests import Completions
from tokenflow.server.service import LONG, Service
from tokenflow.server.transport import event as sse
from tokenflow.server.transport import unless_gone
from tokenflow.types import Completion, StreamEvent, Token

_NAMES = {"top_logprobs": "logprobs"}
_DEFAULT_TOKENS = 16


class Choice(Struct, frozen=True):
    """One response, or what a stream adds to it."""

    index: int
    text: str
    logprobs: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    tokenflow: Ours | UnsetType = UNSET


class Chunk(Struct, frozen=True):
    """An answer, or a piece of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType = UNSET
    tokenflow: Ours | UnsetType = UNSET
    object: str = "text_completion"


class TextShape:
    """How completions are written.

    :param echoes: what each prompt's responses begin with; empty without ``echo``.
    """

    def __init__(
        self,
        request: Completions,
        head: tuple[str, int, str],
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[Echo],
        speller: Speller,
        verifying: frozenset[str],
    ) -> None:
        self._request = request
        self._head = head
        self._prompts = prompts
        self._echoes = echoes
        self._speller = speller
        self._verifying = verifying
        self._extras = Extras(bool(request.return_token_ids), bool(request.return_models))
        self._n = request.n or 1
        self._places: dict[int, Offsets] = {}
        self._moulds: dict[int, Mould] = {}

    def events(self, index: int, event: StreamEvent) -> bytes:
        if event.completion is None and (mould := self._moulds.get(index)) is not None:
            return mould.cast(event.text)
        first = index not in self._places
        said = self._event(
            [self._choice(index, event.text, event.tokens, finish(event.completion), first=first)]
        )
        if first and self._request.logprobs is None and not self._extras:
            self._moulds[index] = Mould(
                self._event([self._choice(index, ANY_TEXT, (), finish(None), first=False)])
            )
        return said

    def last(self, completions: Sequence[Completion]) -> bytes:
        alone = b"" if completions else self._event(self._prompts_alone())
        if not self._request.wants_usage:
            return alone
        return alone + self._event([], self._usage(completions), ours(completions))

    def whole(self, completions: Sequence[Completion]) -> object:
        choices = [
            self._choice(index, done.text, done.tokens, finish(done), first=True)
            for index, done in enumerate(completions)
        ]
        if not completions:
            choices = self._prompts_alone()
        return Chunk(*self._head, choices, self._usage(completions), ours(completions))

    def _prompts_alone(self) -> list[Choice]:
        """The choices of a request for prompts with nothing after them: ``echo`` with ``max_tokens`` 0."""
        count = self._n * len(self._prompts)
        return [self._choice(index, "", (), ("length", None), first=True) for index in range(count)]

    def _choice(self, index: int, text: str, tokens: Sequence[Token], end: End, *, first: bool) -> Choice:
        prompt_ids: Sequence[int] | UnsetType = UNSET
        if first and self._extras.token_ids:
            prompt_ids = self._prompts[index // self._n]
        echo = self._echoes[index // self._n] if first and self._echoes else None
        if first:
            special = self._request.skip_special_tokens is False
            start = 0 if echo is None else len(echo.text)
            self._places[index] = Offsets(self._speller, start, special=special)
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = text_logprobs(tokens, self._speller, self._places[index])
        if echo is not None:
            text, tokens = echo.text + text, (*echo.tokens, *tokens)
            if logprobs is not None:
                logprobs = {key: [*echo.logprobs[key], *values] for key, values in logprobs.items()}
        return Choice(
            index,
            text,
            logprobs,
            *end,
            self._extras.ids(tokens),
            prompt_ids,
            self._extras.writers(tokens),
        )

    def _event(
        self, choices: list[Choice], cost: Usage | UnsetType = UNSET, who: Ours | UnsetType = UNSET
    ) -> bytes:
        return sse(msgspec.json.encode(Chunk(*self._head, choices, cost, who)))

    def _usage(self, completions: Sequence[Completion]) -> Usage:
        return usage(sum(map(len, self._prompts)), completions, self._verifying)


class Echo(Struct, frozen=True):
    """A prompt as a response begins with it, with tokens and log-probabilities where they are wanted."""

    text: str
    tokens: tuple[Token, ...] = ()
    logprobs: Mapping[str, Any] = {}


async def completions(request: Request) -> Answer:
    """Continue one prompt or several, ``n`` times each."""
    service = service_of(request)
    asked = await read(request, Completions)
    record = record_of(request)
    record.rename(asked.request_id)
    target = service.target(asked.model)
    prompts = split(asked.prompt)
    n = 1 if asked.n is None else asked.n
    check_count(n, "n")
    check_count(n * len(prompts), "prompt")
    silent = asked.max_tokens == 0 and bool(asked.echo)
    with renamed(_NAMES), service.reserve(n * len(prompts)) as reservation:
        special = asked.add_special_tokens is not False
        encode = partial(service.router.encode, add_special_tokens=special, most=service.longest)
        ids = [await encode(prompt) async for prompt in paced(prompts)]
        echoes: list[Echo] = []
        if asked.echo:
            echo = partial(_echo, service, asked, prompts, ids, target.member)
            echoes = await unless_gone(request.receive, echo)
        settings = {
            **asked.sampling(),
            "logprobs": asked.logprobs is not None,
            "top_logprobs": asked.logprobs,
        }
        wishes = [
            wish
            for tokens in ids
            for wish in choices(
                service,
                tokens,
                {**settings, "max_tokens": _most(service, asked, len(tokens))},
                0 if silent else n,
            )
        ]
        responses = await prepare(service, reservation, wishes, target.member, asked.params)
    if silent:
        for tokens in ids:
            service.metrics.scored(n, len(tokens))
    shape = TextShape(
        asked,
        (f"cmpl-{record.id}", record.created, target.name),
        ids,
        echoes,
        service.speller(as_ids=bool(asked.return_tokens_as_token_ids)),
        service.verifying,
    )
    return await answer(service, request, responses, shape, bool(asked.stream))


def split(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts of a request: one or several texts, or one or several lists of token ids.

    :raises ApiError: if there is none, or they are neither.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt and type(prompt[0]) is int:  # whether the others are is seen when they are read
        return [prompt]
    if set(map(type, prompt)) in ({str}, {list}):
        return cast(list[Prompt], prompt)
    raise invalid("prompt must be a text, a list of token ids, or a list of either, and not empty", "prompt")


async def _echo(
    service: Service,
    asked: Completions,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    member: str | None,
) -> list[Echo]:
    """What each response begins with: the prompt, and its log-probabilities if wanted."""
    echoes = []
    for prompt, tokens in zip(prompts, ids, strict=True):
        text = prompt if isinstance(prompt, str) else await service.decode(tokens)
        if asked.logprobs is None:
            echoes.append(Echo(text))
            continue
        scored = await service.router.score(tokens, top=asked.logprobs, member=member)
        work = partial(_echo_logprobs, service, asked, prompt, scored)
        echoes.append(Echo(text, scored, await service.aside(work) if len(scored) > LONG else work()))
    return echoes


def _echo_logprobs(
    service: Service, asked: Completions, prompt: Prompt, scored: Sequence[Token]
) -> Mapping[str, Any]:
    """The ``logprobs`` of a prompt; offsets are those in its text as the client wrote it."""
    speller = service.speller(as_ids=bool(asked.return_tokens_as_token_ids))
    logprobs = text_logprobs(scored, speller, Offsets(speller))
    if isinstance(prompt, str):
        special = asked.add_special_tokens is not False
        starts = service.router.tokenizer.starts(prompt, special)
        # Of a beginning that the text spells and the tokenizer adds, one is there.
        logprobs["text_offset"] = starts[-len(scored) :]
    return logprobs


def _most(service: Service, asked: Completions, prompt_tokens: int) -> int | None:
    """How many tokens a response may have: OpenAI's default is 16, or what fits."""
    if asked.max_tokens is not None or "max_tokens" in service.router.recipe.sampling:
        return asked.max_tokens
    return max(1, min(_DEFAULT_TOKENS, (service.longest or 0) - prompt_tokens))
