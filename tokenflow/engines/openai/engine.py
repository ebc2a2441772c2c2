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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenflow.engines.base import EngineInfo, Extend, Feed, Opened, Scores, StepOutput
from tokenflow.engines.checks import check_feeds
from tokenflow.engines.openai.answers import Position, Unreadable, Vocabulary, read_choice
from tokenflow.engines.openai.client import Call, CallFailed, Client
from tokenflow.errors import EngineError, ModelLoadError
from tokenflow.settings import secret
from tokenflow.types import Endpoint, ModelConfig

_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0
_EXTENSIONS = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
    # Its end-of-sequence tokens come as tokens: what ends a response is decided on this side.
    "ignore_eos": True,
}
_PROBE_TOKENS = 2


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
        self._endpoint = endpoint = config.endpoint
        self._client = Client(endpoint, _key(endpoint))
        path = Path(config.path)
        facts = _read(path / "config.json")
        self._vocabulary = Vocabulary(path / "tokenizer.json")
        self._eos = _eos(_read(path / "generation_config.json"), facts)
        listed = self._listed()
        self._model = endpoint.model or listed.get("id", "")
        self._extensions = dict(_EXTENSIONS)
        self._width = int(facts["vocab_size"])
        self._slots: dict[int, _Slot] = {}
        context = config.context_length or listed.get("max_model_len") or facts.get("max_position_embeddings")
        if not context:
            raise ModelLoadError(f"{endpoint.base_url} does not say its context: set context_length")
        self._info = EngineInfo(
            # Listed tokens whose ids are not known have places of their own, beyond the vocabulary.
            vocab_size=self._width + endpoint.top_logprobs + 1,
            hidden_size=0,
            context_length=int(context),
            kv_capacity=config.max_requests * int(context),
            block_size=1,
            max_requests=config.max_requests,
            eos_token_ids=self._eos,
            device="cpu",
            dtype="float32",
            top=max(endpoint.top_logprobs, 1),
        )
        self._probe()
        self._pool = ThreadPoolExecutor(endpoint.concurrency, "call")

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
        wanted = [
            (index, self._slots[extend.slot])
            for index, extend in enumerate(extends)
            if extend.logits != "none"
        ]
        rows: list[Tensor] = []
        failed: dict[int, str] = {}
        answers = self._pool.map(self._next, (slot for _, slot in wanted))
        for (index, _), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Position):
                rows.append(self._row(answer))
            else:
                failed[index] = answer
        logits = torch.stack(rows) if rows else torch.empty(0, self._info.vocab_size)
        return StepOutput(logits, torch.empty(len(rows), 0), failed)

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
        self._client.close()

    def _slot(self, slot: int) -> _Slot:
        found = self._slots.get(slot)
        if found is None:
            raise EngineError(f"slot {slot} is not open")
        return found

    def _next(self, slot: _Slot) -> Position | str:
        """What follows a slot's tokens, or why that cannot be had."""
        for attempt in range(self._endpoint.retries + 1):
            try:
                if slot.ahead is None:
                    slot.ahead = self._read_on(slot)
                return slot.ahead
            except Unreadable as error:
                slot.forget()
                return f"the answer of {self._client.url} cannot be read: {error}"
            except CallFailed as error:
                slot.forget()
                if not error.may_pass or attempt == self._endpoint.retries:
                    return str(error)
                time.sleep(min(max(_PAUSE_S * 2**attempt, error.pause_s), _LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    def _read_on(self, slot: _Slot) -> Position:
        """The next position of a slot's span, or the first of a new one where it has come to its end."""
        if slot.call is not None:
            found = next(slot.pieces, None)
            if found is not None:
                return found
            slot.forget()
        slot.call = self._ask(slot.tokens)
        slot.pieces = self._positions(slot.call)
        found = next(slot.pieces, None)
        if found is None:
            raise Unreadable("it has no tokens")
        return found

    def _ask(self, tokens: Sequence[int]) -> Call:
        room = self._info.context_length - len(tokens)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": max(1, min(self._endpoint.span, room)),
            "temperature": 0,
            "stream": True,
            **self._extensions,
        }
        if self._endpoint.top_logprobs:
            body["logprobs"] = self._endpoint.top_logprobs
        return self._client.stream("/completions", body)

    def _positions(self, call: Call) -> Iterator[Position]:
        """The positions of an answer.

        An endpoint that ends a response has its model write an end-of-sequence token, whether it shows it or
        not.
        """
        last = -1
        for event in call:
            for choice in event.get("choices") or []:
                for position in read_choice(choice, self._vocabulary):
                    last = position.token
                    yield position
                if choice.get("finish_reason") == "stop" and last not in self._eos:
                    if not self._eos:
                        raise Unreadable("it ended, and the model has no end-of-sequence token")
                    yield Position(self._eos[0], ((self._eos[0], 0.0),))

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
        if best[0][0] == position.token and len(best) > 1 and best[0][1] == best[1][1]:
            # Rounded on the way, perhaps: the endpoint's own choice is the greedy one.
            row[position.token] = torch.nextafter(row[position.token], torch.tensor(math.inf))
        return row

    def _listed(self) -> dict[str, Any]:
        """What the endpoint says of its model, or of its first one; empty if it does not."""
        try:
            models = self._client.get("/models").get("data") or []
        except CallFailed as error:
            if self._endpoint.model and error.status:
                return {}
            raise ModelLoadError(f"{error}; is endpoint.base_url right?") from error
        wanted = self._endpoint.model
        if not models or (wanted and all(model.get("id") != wanted for model in models)):
            if wanted:
                return {}
            raise ModelLoadError(f"{self._client.url} lists no models: set endpoint.model")
        return next(model for model in models if not wanted or model.get("id") == wanted)

    def _probe(self) -> None:
        """Ask for two tokens, to know how the endpoint speaks before requests depend on it."""
        prompt = [next(token for token in range(self._width) if token not in self._eos)]
        try:
            try:
                found = self._try(prompt)
            except CallFailed as error:
                if error.status not in (400, 422):
                    raise
                # An endpoint that refuses what it does not know is asked for what everyone knows.
                self._extensions.clear()
                found = self._try(prompt)
        except CallFailed as error:
            raise ModelLoadError(str(error)) from error
        except Unreadable as error:
            raise ModelLoadError(f"the answers of {self._client.url} cannot be read: {error}") from error
        listed = [len(position.best) for position in found if position.token not in self._eos]
        if min(listed, default=self._endpoint.top_logprobs) < self._endpoint.top_logprobs:
            raise ModelLoadError(
                f"{self._client.url} lists {min(listed)} token(s) per position instead of "
                f"{self._endpoint.top_logprobs}: set endpoint.top_logprobs to {min(listed)}"
            )

    def _try(self, prompt: list[int]) -> list[Position]:
        with closing(self._ask(prompt)) as call:
            found: list[Position] = []
            for event in call:
                for choice in event.get("choices") or []:
                    found += read_choice(choice, self._vocabulary)
                    if "content" in (choice.get("logprobs") or {}):
                        # llama-server, which takes ignore_eos to mean that the model must not end at all.
                        self._extensions.pop("ignore_eos", None)
                if len(found) >= _PROBE_TOKENS:
                    break
            return found


def _key(endpoint: Endpoint) -> str | None:
    if not endpoint.api_key_env:
        return None
    key = secret(endpoint.api_key_env)
    if key is None:
        raise ModelLoadError(
            f"the environment variable {endpoint.api_key_env} is not set (endpoint.api_key_env)"
        )
    return key


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
