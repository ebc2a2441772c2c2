"""The openai engine: a model that is reached over HTTP, behind the protocol of engines that compute.

An endpoint is asked for the greedy continuation of a slot's tokens, a span at a time; each position of the
answer carries the log-probabilities of the best tokens there, which are this engine's logits.  As long as
what a slot is fed is what its span says, no call is needed.  Sampling is done on this side, from the listed
tokens, so seeds mean what they mean everywhere.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenflow.endpoints import PAUSE_S, has_time
from tokenflow.engines.base import EngineInfo, Extend, Feed, Opened, Scores, StepOutput
from tokenflow.engines.checks import check_feeds
from tokenflow.engines.openai.answers import Position, Unreadable, Vocabulary
from tokenflow.engines.openai.client import Call, CallFailed
from tokenflow.engines.openai.remote import Remote
from tokenflow.errors import EngineError, ModelLoadError
from tokenflow.types import ModelConfig


@dataclass(slots=True)
class _Slot:
    """``ahead`` is the position of the span that follows ``tokens``; further ones are read from ``call``."""

    tokens: list[int] = field(default_factory=list)
    ahead: Position | None = None
    call: Call | None = None
    pieces: Iterator[Position] = field(default_factory=lambda: iter(()))

    def forget(self) -> None:
        """The span says nothing about what follows any more."""
        self.ahead = None
        self.hang_up()

    def hang_up(self) -> None:
        """Read no further; what is not known yet has to be asked for again."""
        if self.call is not None:
            self.call.close()
            self.call = None

    def feed(self, tokens: Sequence[int]) -> None:
        """Go on to the end of ``tokens``, along the span if it says the same."""
        for token in tokens:
            if self.ahead is not None and self.ahead.token == token:
                self.ahead = None
            else:
                self.forget()
        self.tokens += tokens


class OpenAIEngine:
    """A model behind ``config.endpoint``; see :class:`tokenflow.engines.base.Engine`.

    ``config.path`` holds its tokenizer and its ``config.json``.  Logits are log-probabilities: exact for the
    listed tokens, and for the others what is left, in equal parts.  There are no hidden states, no
    embeddings, and no logits of earlier positions.

    :raises ModelLoadError: if the endpoint does not answer as it must, or no key is where the recipe says.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.endpoint is None:
            raise ModelLoadError("engine 'openai' needs endpoint.base_url")
        self._endpoint = config.endpoint
        self._step_timeout = config.step_timeout
        path = Path(config.path)
        facts = _read(path / "config.json")
        facts |= facts.get("text_config") or {}
        eos = _eos(_read(path / "generation_config.json"), facts)
        self._width = width = int(facts.get("vocab_size") or 0)
        if not width:
            raise ModelLoadError(f"{path / 'config.json'} has no vocab_size")
        some = next(token for token in range(width) if token not in eos)
        self._remote = Remote(config.endpoint, Vocabulary(path / "tokenizer.json", width), eos, some)
        longest = self._remote.context_length or int(facts.get("max_position_embeddings") or 0)
        context = config.context_length or longest
        if not context or (longest and context > longest):
            self._remote.close()
            raise ModelLoadError(
                f"context_length {context} is more than the {longest} of {self._remote.url}"
                if context
                else f"{self._remote.url} does not say how long its context is: set context_length"
            )
        self._info = EngineInfo(
            # Listed tokens whose ids are not known have places of their own, beyond the vocabulary.
            vocab_size=width + config.endpoint.top_logprobs + 1,
            hidden_size=0,
            context_length=context,
            kv_capacity=config.max_requests * context,
            block_size=1,
            max_requests=config.max_requests,
            eos_token_ids=eos,
            device="cpu",
            dtype="float32",
        )
        self._slots: dict[int, _Slot] = {}
        self._pool = ThreadPoolExecutor(config.endpoint.concurrency, "call")

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def embeddings(self) -> Tensor:
        raise ModelLoadError("a router head needs the model's embeddings, and an endpoint does not show them")

    def open(self, tokens: Sequence[int]) -> Opened:
        if len(self._slots) >= self._info.max_requests:
            raise EngineError(f"all {self._info.max_requests} slots are taken; release one first")
        slot = next(i for i in range(self._info.max_requests) if i not in self._slots)
        self._slots[slot] = _Slot()
        return Opened(slot, 0)

    def step(self, extends: Sequence[Extend]) -> StepOutput:
        feeds = [Feed(extend.slot, extend.tokens) for extend in extends]
        check_feeds(feeds, self.length, self._info.context_length, self._width)
        if any(extend.logits == "all" and len(extend.tokens) > 1 for extend in extends):
            raise EngineError("an endpoint gives the logits of the last position only")
        for slot, tokens in feeds:
            self._slots[slot].feed(tokens)
        wanted = [index for index, extend in enumerate(extends) if extend.logits != "none"]
        rows: list[Tensor] = []
        known: list[int] = []
        failed: dict[int, str] = {}
        began = time.monotonic()
        slots = {extends[index].slot: self._slots[extends[index].slot] for index in wanted}
        answers = self._pool.map(partial(self._next, began, self._crowded(slots)), slots.values())
        for index, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Position):
                rows.append(self._row(answer))
                known.append(max(1, sum(token is not None for token, _ in answer.best)))
            else:
                failed[index] = answer
        logits = torch.stack(rows) if rows else torch.empty(0, self._info.vocab_size)
        return StepOutput(logits, torch.empty(len(rows), 0), torch.tensor(known, dtype=torch.int64), failed)

    def length(self, slot: int) -> int:
        return len(self._slot(slot).tokens)

    def truncate(self, slot: int, length: int) -> None:
        found = self._slot(slot)
        if not 0 <= length <= len(found.tokens):
            raise EngineError(f"cannot truncate slot {slot} to {length} tokens: it holds {len(found.tokens)}")
        if length < len(found.tokens):
            found.forget()
            del found.tokens[length:]

    def release(self, slot: int) -> None:
        self._slot(slot).forget()
        del self._slots[slot]

    def score(self, tokens: Sequence[int], top: int = 0) -> Scores:
        raise EngineError("engine 'openai' does not score: endpoints differ in what they say of a prompt")

    def close(self) -> None:
        for slot in self._slots.values():
            slot.forget()
        self._pool.shutdown()
        self._remote.close()

    def _slot(self, slot: int) -> _Slot:
        found = self._slots.get(slot)
        if found is None:
            raise EngineError(f"slot {slot} is not open")
        return found

    def _crowded(self, asking: Collection[int]) -> bool:
        """Whether a step asks for more slots than calls may be open; if not, others' calls make room for it.

        Where it is crowded, no call outlasts its token, so that the next slot can have its turn.
        """
        crowded = len(asking) > self._endpoint.concurrency
        room = 0 if crowded else self._endpoint.concurrency - len(asking)
        parked = [slot for number, slot in self._slots.items() if slot.call and number not in asking]
        for slot in [*parked[room:], *(self._slots[number] for number in asking if crowded)]:
            slot.hang_up()
        return crowded

    def _next(self, began: float, crowded: bool, slot: _Slot) -> Position | str:
        """What follows a slot's tokens, or why that cannot be had.

        A row that does not come in time fails alone: a step that takes too long would cost all of them, and
        the worker.

        :param began: when the step did.
        :param crowded: others wait for its call to end.
        """
        if slot.ahead is None and not self._has_time(began):
            return (
                f"{self._remote.url} was too slow with other requests for this one to be asked: raise "
                "endpoint.concurrency or step_timeout, or lower max_requests"
            )
        for attempt in range(self._endpoint.retries + 1):
            try:
                if slot.ahead is None:
                    slot.ahead = self._read_on(slot)
                    if crowded:
                        slot.hang_up()
                return slot.ahead
            except Unreadable as error:
                slot.forget()
                return f"the answer of {self._remote.url} cannot be read: {error}"
            except CallFailed as error:
                slot.forget()
                pause_s = max(PAUSE_S * 2**attempt, error.pause_s)
                late = not self._has_time(began, pause_s)
                if not error.may_pass or late or attempt == self._endpoint.retries:
                    return str(error)
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def _has_time(self, began: float, pause_s: float = 0.0) -> bool:
        """Whether another call may be begun after a pause, in a step that began then."""
        elapsed_s = time.monotonic() - began + pause_s
        return has_time(elapsed_s, self._endpoint.timeout_s, self._step_timeout)

    def _read_on(self, slot: _Slot) -> Position:
        """The next position of a slot's span, or the first of a new one where it has come to its end."""
        if slot.call is not None:
            found = next(slot.pieces, None)
            if found is not None:
                return found
            slot.forget()
        room = self._info.context_length - len(slot.tokens)
        slot.call = self._remote.ask(slot.tokens, max(1, min(self._endpoint.span, room)))
        slot.pieces = self._remote.positions(slot.call)
        found = next(slot.pieces, None)
        if found is None:
            raise Unreadable("it has no tokens")
        return found

    def _row(self, position: Position) -> Tensor:
        """Log-probabilities of a position, float32 [V].

        The tokens that are not listed share what is left; none has more than the least that is listed.
        """
        best = position.best or ((position.token, 0.0),)
        left = 1.0 - math.fsum(math.exp(value) for _, value in best)
        others = self._width - len(best)
        each = math.log(left / others) if left > 0 and others > 0 else -math.inf
        row = torch.full((self._info.vocab_size,), -math.inf)
        row[: self._width] = min(each, best[-1][1])
        nameless = self._width
        for token, value in best:
            if token is None:
                token, nameless = nameless, nameless + 1
            row[token] = value
        if best[0][0] == position.token and int(row.argmax()) != position.token:
            # They differ by less than float32 shows, or were rounded: the endpoint's own choice is greedy.
            row[position.token] = torch.nextafter(row.max(), torch.tensor(math.inf))
        return row


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from error
    return raw if isinstance(raw, dict) else {}


def _eos(*configs: dict[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))
