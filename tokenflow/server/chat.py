"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response as Answer

from tokenflow.server.answers import ANY_TEXT, End, Extras, Mould, Ours, Usage, finish, ours, usage
from tokenflow.server.errors import invalid
from tokenflow.server.generation import answer, check_count, choices, prepare, renamed
from tokenflow.server.logprobs import Speller, chat_logprobs
from tokenflow.server.reading import read
from tokenflow.server.records import record_of, service_of
from tokenflow.server.requests import Chat, chat_variables
from tokenflow.server.transport import event as sse
from tokenflow.types import Completion, StreamEvent, Token

_NAMES = {"prompt": "messages", "template": "chat_template_kwargs"}


class Message(Struct, frozen=True):
    """What the assistant says."""

    content: str
    role: str = "assistant"


class Delta(Struct, frozen=True):
    """What a stream adds to it."""

    content: str
    role: str | UnsetType = UNSET


class Choice(Struct, frozen=True, kw_only=True):
    """One response, or what a stream adds to it."""

    index: int
    message: Message | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    logprobs: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    tokenflow: Ours | UnsetType = UNSET


class Chunk(Struct, frozen=True):
    """An answer, or a piece of a streamed one."""

    id: str
    created: int
    model: str
    object: str
    choices: list[Choice]
    usage: Usage | UnsetType = UNSET
    tokenflow: Ours | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatShape:
    """How chat completions are written."""

    def __init__(
        self,
        request: Chat,
        head: tuple[str, int, str],
        prompt: Sequence[int],
        speller: Speller,
        verifying: frozenset[str],
    ) -> None:
        self._request = request
        self._head = head
        self._prompt = prompt
        self._speller = speller
        self._verifying = verifying
        self._extras = Extras(bool(request.return_token_ids), bool(request.return_models))
        self._begun: set[int] = set()
        self._moulds: dict[int, Mould] = {}

    def events(self, index: int, event: StreamEvent) -> bytes:
        if event.completion is None and (mould := self._moulds.get(index)) is not None:
            return mould.cast(event.text)
        said = self._choice(index, event.tokens, finish(event.completion), delta=Delta(event.text))
        if index in self._begun:
            return self._event([said])
        prompt = self._prompt if self._extras.token_ids and not self._begun else UNSET
        self._begun.add(index)
        if not self._request.logprobs and not self._extras:
            self._moulds[index] = Mould(
                self._event([self._choice(index, (), finish(None), delta=Delta(ANY_TEXT))])
            )
        opening = Choice(index=index, delta=Delta("", "assistant"))
        return self._event([opening], prompt=prompt) + self._event([said])

    def last(self, completions: Sequence[Completion]) -> bytes:
        if not self._request.wants_usage:
            return b""
        return self._event([], self._usage(completions), ours(completions))

    def whole(self, completions: Sequence[Completion]) -> object:
        return Chunk(
            *self._head,
            "chat.completion",
            [
                self._choice(index, done.tokens, finish(done), message=Message(done.text))
                for index, done in enumerate(completions)
            ],
            self._usage(completions),
            ours(completions),
            self._prompt if self._extras.token_ids else UNSET,
        )

    def _choice(
        self,
        index: int,
        tokens: Sequence[Token],
        end: End,
        *,
        message: Message | UnsetType = UNSET,
        delta: Delta | UnsetType = UNSET,
    ) -> Choice:
        finish_reason, stop_reason = end
        return Choice(
            index=index,
            message=message,
            delta=delta,
            logprobs=chat_logprobs(tokens, self._speller) if self._request.logprobs else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=self._extras.ids(tokens),
            tokenflow=self._extras.writers(tokens),
        )

    def _event(
        self,
        choices: list[Choice],
        cost: Usage | UnsetType = UNSET,
        who: Ours | UnsetType = UNSET,
        *,
        prompt: Sequence[int] | UnsetType = UNSET,
    ) -> bytes:
        chunk = Chunk(*self._head, "chat.completion.chunk", choices, cost, who, prompt)
        return sse(msgspec.json.encode(chunk))

    def _usage(self, completions: Sequence[Completion]) -> Usage:
        return usage(len(self._prompt), completions, self._verifying)


async def chat(request: Request) -> Answer:
    """Answer a conversation, ``n`` times."""
    service = service_of(request)
    asked = await read(request, Chat)
    record = record_of(request)
    record.rename(asked.request_id)
    target = service.target(asked.model)
    n = 1 if asked.n is None else asked.n
    check_count(n, "n")
    if not asked.messages:
        raise invalid("messages must not be empty", "messages")
    if asked.top_logprobs and not asked.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    settings = {**asked.sampling(), "logprobs": asked.logprobs, "top_logprobs": asked.top_logprobs}
    names = _NAMES
    if asked.max_completion_tokens is not None:
        settings["max_tokens"] = asked.max_completion_tokens
        names = {**_NAMES, "max_tokens": "max_completion_tokens"}
    with renamed(names), service.reserve(n) as reservation:
        prompt = await service.router.encode(
            asked.messages, template=chat_variables(asked), most=service.longest
        )
        wishes = choices(service, prompt, settings, n)
        responses = await prepare(service, reservation, wishes, target.member, asked.params)
    shape = ChatShape(
        asked,
        (f"chatcmpl-{record.id}", record.created, target.name),
        prompt,
        service.speller(as_ids=bool(asked.return_tokens_as_token_ids)),
        service.verifying,
    )
    return await answer(service, request, responses, shape, bool(asked.stream))
