"""POST /generate, and what else SGLang's own clients ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response as Answer

from tokenflow.prompts import Prompt
from tokenflow.server.answers import simulated
from tokenflow.server.errors import invalid
from tokenflow.server.generation import answer, check_count, choices, paced, prepare, renamed
from tokenflow.server.logprobs import Speller, number
from tokenflow.server.reading import read
from tokenflow.server.records import record_of, service_of
from tokenflow.server.requests import SAMPLING, Generate, Generation, convert, refuse
from tokenflow.server.service import LONG, Service
from tokenflow.server.transport import Json, unless_gone
from tokenflow.server.transport import event as sse
from tokenflow.types import Completion, StreamEvent, Token

_WITHIN = "sampling_params."
_OURS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_THEIRS = {ours: name for name, ours in _OURS.items()}
_NAMES = {
    **{name: _WITHIN + _THEIRS.get(name, name) for name in SAMPLING},
    "top_logprobs": "top_logprobs_num",
}
_DEFAULT_TOKENS = 128

Triple = tuple[float | None, int, str | None]
"""A log-probability, the token's id, and its text if that is wanted."""


class Logprobs:
    """Tokens and their log-probabilities as they are written, which grow with a stream."""

    def __init__(self, request: Generate, speller: Speller, tokens: Iterable[Token] = ()) -> None:
        self.ids: list[int] = []
        self._request = request
        self._speller = speller
        self._tokens: list[Triple] = []
        self._tops: list[list[Triple] | None] = []
        self.add(tokens)

    def add(self, tokens: Iterable[Token]) -> None:
        """Tokens follow."""
        for token in tokens:
            self.ids.append(token.id)
            if self._request.return_logprob:
                self._tokens.append(self._triple(token.logprob, token.id))
            if self._request.top_logprobs_num:
                tops = [self._triple(best.logprob, best.id) for best in token.top_logprobs]
                self._tops.append(tops or None)

    def named(self, name: str) -> dict[str, Any]:
        """Their keys in ``meta_info``: of the ``input``, or of the ``output``."""
        if not self._request.return_logprob:
            return {}
        keys: dict[str, Any] = {f"{name}_token_logprobs": self._tokens}
        if self._request.top_logprobs_num:
            keys[f"{name}_top_logprobs"] = self._tops
        return keys

    def _triple(self, logprob: float | None, token: int) -> Triple:
        text = self._speller.text(token) if self._request.return_text_in_logprobs else None
        return (None if logprob is None else number(logprob), token, text)


class NativeShape:
    """How /generate writes answers: streamed text is all of the text so far.

    :param batch: the request had a list of prompts, or wants several responses: answers come as a list.
    :param inputs: the prompts' log-probabilities; empty ones where they are not wanted.
    """

    def __init__(
        self,
        request: Generate,
        ids: Sequence[str],
        prompts: Sequence[Sequence[int]],
        inputs: Sequence[Logprobs],
        speller: Speller,
        batch: bool,
    ) -> None:
        self._request = request
        self._ids = ids
        self._prompts = prompts
        self._inputs = inputs
        self._batch = batch
        self._texts = [""] * len(ids)
        self._outputs = [Logprobs(request, speller) for _ in ids]

    def events(self, index: int, event: StreamEvent) -> bytes:
        self._texts[index] += event.text
        self._outputs[index].add(event.tokens)
        result = self._result(index, self._texts[index], event.completion)
        return sse(msgspec.json.encode({**result, "index": index} if self._batch else result))

    def last(self, completions: Sequence[Completion]) -> bytes:
        return b""

    def whole(self, completions: Sequence[Completion]) -> object:
        results = []
        for index, done in enumerate(completions):
            self._outputs[index].add(done.tokens)
            results.append(self._result(index, done.text, done))
        return results if self._batch else results[0]

    def _result(self, index: int, text: str, done: Completion | None) -> dict[str, Any]:
        output = self._outputs[index]
        meta: dict[str, Any] = {
            "id": self._ids[index],
            "finish_reason": _finish(done),
            "prompt_tokens": len(self._prompts[index]),
            "completion_tokens": len(output.ids),
            "cached_tokens": 0,
        }
        if done is not None:
            meta["e2e_latency"] = done.timing.latency_s
            meta["tokenflow"] = {
                **simulated([done]),
                "tokens": dict(done.usage.by_model),
                "handoffs": done.usage.handoffs,
                "dropped": done.usage.dropped,
                "seed": done.seed,
            }
        meta |= self._inputs[index].named("input") | output.named("output")
        return {"text": text, "output_ids": output.ids, "meta_info": meta}


async def generate(request: Request) -> Answer:
    """Continue one prompt or several."""
    service = service_of(request)
    asked = await read(request, Generate)
    prompts, batch = split(asked)
    n, settings = sampling(service, asked)
    count = n * len(prompts)
    check_count(count, "sampling_params.n")
    start = -1 if asked.logprob_start_len is None else asked.logprob_start_len
    names = {**_NAMES, "prompt": "text" if asked.text is not None else "input_ids"}
    with renamed(names), service.reserve(count) as reservation:
        encode = partial(service.router.encode, most=service.longest)
        ids = [await encode(prompt) async for prompt in paced(prompts)]
        inputs = [Logprobs(asked, service.speller()) for _ in ids]
        if asked.return_logprob and start >= 0:
            inputs = await unless_gone(request.receive, partial(_score, service, asked, ids, start))
        wishes = [wish for tokens in ids for wish in choices(service, tokens, settings, n)]
        responses = await prepare(service, reservation, wishes, None, asked.params)
    shape = NativeShape(
        asked,
        _names(asked, record_of(request).id, count),
        [tokens for tokens in ids for _ in range(n)],
        [logprobs for logprobs in inputs for _ in range(n)],
        service.speller(),
        batch or n > 1,
    )
    return await answer(service, request, responses, shape, bool(asked.stream))


def split(asked: Generate) -> tuple[list[Prompt], bool]:
    """The prompts of a request, and whether they came as a list.

    :raises ApiError: unless there is either text or ids.
    """
    if (asked.text is None) == (asked.input_ids is None):
        raise invalid("give either text or input_ids", "text")
    if isinstance(asked.text, str):
        return [asked.text], False
    given = asked.text if asked.text is not None else asked.input_ids
    if asked.text is None and given and type(given[0]) is int:
        return [cast(Prompt, given)], False
    kinds = set(map(type, given or ()))
    if asked.text is not None and kinds == {str}:
        return cast(list[Prompt], given), True
    if asked.text is None and kinds == {list}:
        return cast(list[Prompt], given), True
    name = "text" if asked.text is not None else "input_ids"
    raise invalid(f"{name} must be one prompt or a list of prompts, and not empty", name)


def sampling(service: Service, asked: Generate) -> tuple[int, dict[str, Any]]:
    """How many responses each prompt gets, and the settings of each; :raises ApiError: if they are wrong."""
    given = {_OURS.get(name, name): value for name, value in (asked.sampling_params or {}).items()}
    refuse(given, within=_WITHIN)
    common = convert(given, Generation, _WITHIN, _THEIRS)
    settings = common.sampling()
    if settings["max_tokens"] is None and "max_tokens" not in service.router.recipe.sampling:
        settings["max_tokens"] = _DEFAULT_TOKENS
    settings["logprobs"] = bool(asked.return_logprob)
    settings["top_logprobs"] = asked.top_logprobs_num
    n = 1 if common.n is None else common.n
    check_count(n, "sampling_params.n")
    return n, settings


async def model_info(request: Request) -> Answer:
    """GET /model_info: where the tokenizer of the recipe is found."""
    service = service_of(request)
    path = service.root_of(None)
    return Json(
        {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "served_model_name": service.names[0],
        }
    )


async def server_info(request: Request) -> Answer:
    """GET /server_info: the recipe's models, and what they are doing."""
    service = service_of(request)
    service.require_serving()
    status = service.router.status
    return Json(
        {
            "version": service.version,
            "served_model_name": service.names[0],
            "model_path": service.root_of(None),
            "max_running_requests": status.load.slots,
            "max_total_num_tokens": min(model.kv_capacity for model in status.models),
            "context_length": status.longest,
            "internal_states": status.models,
        }
    )


async def _score(
    service: Service, asked: Generate, ids: Sequence[Sequence[int]], start: int
) -> list[Logprobs]:
    """The log-probabilities of prompts, from token ``start`` of each on."""
    found = []
    for tokens in ids:
        scored = await service.router.score(tokens, top=asked.top_logprobs_num or 0)
        work = partial(Logprobs, asked, service.speller(), scored[start:])
        found.append(await service.aside(work) if len(scored) > LONG else work())
    return found


def _names(asked: Generate, name: str, count: int) -> list[str]:
    """An id for each response: the client's, if it gave one for each."""
    if isinstance(asked.rid, str) and count == 1:
        return [asked.rid]
    if isinstance(asked.rid, list) and len(asked.rid) == count:
        return asked.rid
    return [name] if count == 1 else [f"{name}-{index}" for index in range(count)]


def _finish(done: Completion | None) -> Mapping[str, Any] | None:
    if done is None:
        return None
    if done.finish_reason == "length":
        return {"type": "length", "length": len(done.tokens)}
    matched = done.tokens[-1].id if done.stop_reason is None else done.stop_reason
    return {"type": "stop", "matched": matched}
