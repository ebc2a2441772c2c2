"""One response as its caller sees it: committed tokens become text, events and a completion."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from types import TracebackType

from tokenflow.actors.sequence import Phase, Sequence
from tokenflow.actors.system import ActorSystem
from tokenflow.errors import RequestCancelled
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.text.transcript import Transcript
from tokenflow.types import (
    Completion,
    Reservation,
    SamplingParams,
    StreamEvent,
    Timing,
    Token,
    Usage,
)
from tokenflow.wire.messages import Scored
from tokenflow.written import Written, written

_MOST_BEHIND = 16
"""Tokens that a reader of a stream may have missed and still gets one by one."""
_ONE_AT_A_TIME = "another task waits for this response already; one at a time may"


class Reader:
    """Listens to one sequence and keeps its text: what its actors hold, apart from what the caller holds.

    ``texts`` is what each committed token added; it ends before a stop token.  With stop strings it must
    follow every commit; without, it catches up when the actor has time to tell.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.transcript = Transcript(
            tokenizer,
            sampling.stop,
            min_tokens=sampling.min_tokens,
            special=not sampling.skip_special_tokens,
        )
        self.texts: list[str] = []
        self.streaming = False
        self._waiter: asyncio.Future[None] | None = None
        self._pump: Callable[[], bool] | None = None
        self._eager = bool(sampling.stop)
        self._stop_token_ids = sampling.stop_token_ids

    def committed(self, token: int) -> bool:
        """Part of :class:`tokenflow.actors.sequence.Listener`."""
        if self._eager:
            self._read(token)
        return self.transcript.stopped

    def wake(self, sequence: Sequence) -> None:
        """Part of :class:`tokenflow.actors.sequence.Listener`."""
        if not self._eager:
            first = sequence.prompt_tokens
            for token in sequence.tokens[first + len(self.texts) : first + sequence.final]:
                if token in sequence.limits.stop_ids:
                    break
                self._read(token)
        over, waiter = sequence.phase is Phase.FINISHED, self._waiter
        if waiter is None or waiter.done() or not (self.streaming or over):
            return
        try:
            # What follows the end is not for those who end it to do.
            if self._pump is None or over or not self._pump():
                self._pump = None
                waiter.set_result(None)
        except Exception as error:
            waiter.set_exception(error)

    def stop_reason(self, sequence: Sequence) -> int | str | None:
        """The stop string or stop token that ended a finished response; none for the models' own."""
        if sequence.finish_reason != "stop" or self.transcript.matched is not None:
            return self.transcript.matched
        ended_by = sequence.tokens[-1]
        return ended_by if ended_by in self._stop_token_ids else None

    def news(self, pump: Callable[[], bool] | None = None) -> asyncio.Future[None]:
        """Comes true with the next news: of tokens while ``streaming``, else of the end.

        :param pump: takes news of tokens at once; answers whether it goes on, so that nobody need wake up.
        :raises RuntimeError: if somebody waits already, who would never be told.
        """
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError(_ONE_AT_A_TIME)
        self._waiter = asyncio.get_running_loop().create_future()
        self._pump = pump
        return self._waiter

    def _read(self, token: int) -> None:
        self.texts.append(self.transcript.advance(token).text)


class Response(AsyncIterator[StreamEvent]):
    """A running response: an asynchronous iterator over what it gains.

    Leaving its context, closing it, dropping it, or cancelling the task that waits for it cancels the
    request on every model.  A slow reader gets larger events, never a backlog.
    """

    def __init__(
        self,
        system: ActorSystem,
        open: Callable[[], Awaitable[tuple[Sequence, Reader]]],
        reservation: Reservation | None = None,
    ) -> None:
        """``open`` makes the request when it is first waited for; it is queued in a place of the reservation,
        if there is one."""
        self._system = system
        self._open = open
        self._reservation = reservation
        self._request: tuple[Sequence, Reader] | None = None
        self._opening = False
        self._names = {code: actor.model.name for code, actor in system.actors.items()}
        self._told = 0
        self._ended = False

    async def begin(self) -> None:
        """Check the request and queue it, without waiting for what it gains.

        :raises InvalidRequest: if the prompt or a sampling value is wrong.
        :raises Overloaded: if too many requests wait already.
        :raises TokenflowError: if the router or a model it needs failed.
        """
        await self._begun()

    async def completion(self) -> Completion:
        """Wait for the end.

        :raises RequestError: if this request failed or was cancelled.
        :raises TokenflowError: if the router or a model it needs failed.
        """
        sequence, reader = await self._begun()
        while sequence.phase is not Phase.FINISHED:
            await self._news(reader)
        return self._complete(sequence, reader)

    async def __anext__(self) -> StreamEvent:
        if self._ended:
            raise StopAsyncIteration
        sequence, reader = self._request or await self._begun()
        reader.streaming = True
        while (event := self._next(sequence, reader)) is None:
            await self._news(reader)
        return event

    async def pour(self, sink: Callable[[StreamEvent], None], ready: Callable[[], bool]) -> bool:
        """Give events to ``sink`` as long as it is ``ready``; answers whether there are more.

        Unlike iteration, this wakes no task up for every token: whoever tells of them calls ``sink``.

        :raises TokenflowError: as iteration does; and what ``sink`` raises.
        """
        sequence, reader = self._request or await self._begun()
        reader.streaming = True

        def pump() -> bool:
            while not self._ended and ready():
                if (event := self._next(sequence, reader)) is None:
                    return True
                sink(event)
            return False

        while pump():
            await self._news(reader, pump)
        return not self._ended

    def _next(self, sequence: Sequence, reader: Reader) -> StreamEvent | None:
        """The next event, if there is news."""
        start, over = self._told, sequence.phase is Phase.FINISHED
        if not over and len(reader.texts) == start:
            return None
        left = (sequence.output_tokens if over else len(reader.texts)) - start
        # Several tokens may have come at once; events tell them apart, unless the reader cannot keep up, or
        # they have become final together.
        if several := 1 < left <= _MOST_BEHIND and not sequence.rollback:
            self._told += 1
        else:
            self._told = len(reader.texts)
        if over and not several:
            self._ended = True
            shown = len("".join(reader.texts[:start]))
            completion = self._complete(sequence, reader)
            return StreamEvent(completion.text[shown:], tuple(completion.tokens[start:]), completion)
        tokens = self._tokens(sequence, reader, start, self._told)
        return StreamEvent("".join([token.text for token in tokens]), tokens)

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def aclose(self) -> None:
        """Cancel the request, if it is not over, and wait until no model holds anything of it."""
        self.close()
        if self._request is not None:
            await self._system.gone(self._request[0])

    def close(self) -> None:
        """Cancel the request, if it is not over; does not wait."""
        self._ended = True
        if self._request is not None:
            self._system.abort(self._request[0])

    def __del__(self) -> None:
        self.close()

    async def _begun(self) -> tuple[Sequence, Reader]:
        if self._request is not None:
            return self._request
        if self._opening:
            raise RuntimeError(_ONE_AT_A_TIME)
        self._opening, reserved = True, self._reservation
        try:
            with self._system.admission.reserve() if reserved is None else nullcontext(reserved) as place:
                request = await self._open()
                if self._ended:
                    raise RequestCancelled("the response was closed before it began")
                self._system.submit(request[0], place)
        finally:
            self._opening = False
        self._request = request
        return request

    async def _news(self, reader: Reader, pump: Callable[[], bool] | None = None) -> None:
        news = reader.news(pump)
        try:
            await news
        except BaseException:
            self.close()
            raise

    def _tokens(self, sequence: Sequence, reader: Reader, start: int, end: int) -> tuple[Token, ...]:
        """Output tokens ``start`` to ``end``; a stop token has no text."""
        texts, first = reader.texts, sequence.prompt_tokens
        return tuple(
            [
                written(
                    sequence.tokens[first + index],
                    texts[index] if index < len(texts) else "",
                    self._names[sequence.writers[index]],
                    sequence.logprobs[index],
                    sequence.tops[index],
                )
                for index in range(start, end)
            ]
        )

    def _complete(self, sequence: Sequence, reader: Reader) -> Completion:
        if sequence.error is not None:
            raise sequence.error
        assert sequence.finish_reason is not None
        # What was held back (half a character, the start of a stop string) belongs to the last text.
        if held := reader.transcript.finish().text:
            reader.texts[-1] += held
        count = sequence.output_tokens
        return Completion(
            text=reader.transcript.text,
            tokens=Written(
                sequence.tokens[sequence.prompt_tokens :],
                reader.texts + [""] * (count - len(reader.texts)),
                [self._names[code] for code in sequence.writers],
                sequence.logprobs,
                sequence.tops,
            ),
            finish_reason=sequence.finish_reason,
            usage=Usage(
                prompt_tokens=sequence.prompt_tokens,
                completion_tokens=count,
                by_model={name: sequence.written[code] for code, name in self._names.items()},
                handoffs=sequence.handoffs,
                dropped=sequence.dropped,
            ),
            timing=Timing(
                ttft_s=sequence.first_token_at - sequence.submitted_at,
                latency_s=sequence.finished_at - sequence.submitted_at,
                queued_s=sequence.admitted_at - sequence.submitted_at,
            ),
            seed=sequence.seed,
            simulated=bool(self._system.recipe.simulated),
            stop_reason=reader.stop_reason(sequence),
        )


def scored_tokens(
    tokenizer: Tokenizer, model: str, tokens: list[int], scored: Scored | None
) -> tuple[Token, ...]:
    """The tokens of a prompt with what a model said of all but the first; their texts make up its text."""
    transcript = Transcript(tokenizer)
    texts = [transcript.advance(token).text for token in tokens]
    texts[-1] += transcript.finish().text
    logprobs = [None, *(scored.logprobs if scored else ())]
    tops = [[], *(scored.top if scored else ())]
    columns = zip(tokens, texts, [model] * len(tokens), logprobs, tops, strict=True)
    return tuple(itertools.starmap(written, columns))
