"""POST /generate, and what else SGLang's own clients ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response as Answer

from tokenflow.prompts import Prompt
from tokenflow.server.answers import simulated
from tokenflow.server.errors import invalid
from tokenflow.server.generation import Wish, answer, check_count, paced, prepare, renamed
from tokenflow.server.logprobs import Speller, number
from tokenflow.server.records import record_of, service_of
from tokenflow.server.requests import Generate, Generation, convert, decode, refuse
from tokenflow.server.service import Service
from tokenflow.server.transport import Json, read_body, unless_gone
from tokenflow.server.transport import event as sse
from tokenflow.types import Completion, StreamEvent, Token

_NAMES = {
    "prompt": "text",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "top_logprobs": "top_logprobs_num",
}
_OURS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_DEFAULT_TOKENS = 128


class NativeShape:
    """How /generate writes answers: streamed text is all of the text so far.

    :param batch: the request had a list of prompts, or wants several responses: answers come as a list.
    :param inputs: the prompts' scored tokens, where they are wanted.
    """

    def __init__(
        self,
        request: Generate,
        ids: Sequence[str],
        prompts: Sequence[Sequence[int]],
        inputs: Sequence[Sequence[Token]],
        speller: Speller,
        batch: bool,
    ) -> None:
        self._request = request
        self._ids = ids
        self._prompts = prompts
        self._inputs = inputs
        self._speller = speller
        self._batch = batch
        self._texts = [""] * len(ids)
        self._tokens: list[list[Token]] = [[] for _ in ids]

    def events(self, index: int, event: StreamEvent) -> bytes:
        self._texts[index] += event.text
        self._tokens[index].extend(event.tokens)
        result = self._result(index, self._texts[index], self._tokens[index], event.completion)
        return sse(msgspec.json.encode({**result, "index": index} if self._batch else result))

    def last(self, completions: Sequence[Completion]) -> bytes:
        return b""

    def whole(self, completions: Sequence[Completion]) -> object:
        results = [
            self._result(index, done.text, done.tokens, done) for index, done in enumerate(completions)
        ]
        return results if self._batch else results[0]

    def _result(
        self, index: int, text: str, tokens: Sequence[Token], done: Completion | None
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._ids[index],
            "finish_reason": _finish(done),
            "prompt_tokens": len(self._prompts[index]),
            "completion_tokens": len(tokens),
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
        if self._request.return_logprob:
            start = max(0, self._request.logprob_start_len or 0)
            inputs = self._inputs[index][start:] if self._inputs else ()
            for name, part in (("input", inputs), ("output", tokens)):
                meta[f"{name}_token_logprobs"] = [self._triple(t.logprob, t.id) for t in part]
                if self._request.top_logprobs_num:
                    meta[f"{name}_top_logprobs"] = [
                        [self._triple(best.logprob, best.id) for best in token.top_logprobs] or None
                        for token in part
                    ]
        return {"text": text, "output_ids": [token.id for token in tokens], "meta_info": meta}

    def _triple(self, logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
        text = self._speller.text(token) if self._request.return_text_in_logprobs else None
        return (None if logprob is None else number(logprob), token, text)


async def generate(request: Request) -> Answer:
    """Continue one prompt or several."""
    service = service_of(request)
    asked = decode(await read_body(request), Generate)
    prompts, batch = split(asked)
    n, settings = sampling(service, asked)
    count = n * len(prompts)
    check_count(count, "sampling_params.n")
    start = -1 if asked.logprob_start_len is None else asked.logprob_start_len
    with renamed(_NAMES), service.reserve(count) as reservation:
        encode = partial(service.router.encode, most=service.longest)
        ids = [await encode(prompt) async for prompt in paced(prompts)]
        inputs: list[tuple[Token, ...]] = []
        if asked.return_logprob and start >= 0:
            inputs = await unless_gone(request.receive, partial(_score, service, asked, ids))
        wishes = [Wish(tokens, {**settings, "choice": choice}) for tokens in ids for choice in range(n)]
        responses = await prepare(service, reservation, wishes, None, asked.params)
    shape = NativeShape(
        asked,
        _names(asked, record_of(request).id, count),
        [tokens for tokens in ids for _ in range(n)],
        [tokens for tokens in inputs for _ in range(n)],
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
    kinds = set(map(type, given or ()))
    if asked.text is not None and kinds == {str}:
        return cast(list[Prompt], given), True
    if asked.text is None and kinds == {int}:
        return [cast(Prompt, given)], False
    if asked.text is None and kinds == {list}:
        return cast(list[Prompt], given), True
    name = "text" if asked.text is not None else "input_ids"
    raise invalid(f"{name} must be one prompt or a list of prompts, and not empty", name)


def sampling(service: Service, asked: Generate) -> tuple[int, dict[str, Any]]:
    """How many responses each prompt gets, and the settings of each; :raises ApiError: if they are wrong."""
    given = {_OURS.get(name, name): value for name, value in (asked.sampling_params or {}).items()}
    refuse(given)
    common = convert(given, Generation)
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


async def _score(service: Service, asked: Generate, ids: Sequence[Sequence[int]]) -> list[tuple[Token, ...]]:
    top = asked.top_logprobs_num or 0
    return [await service.router.score(tokens, top=top) for tokens in ids]


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
    return {"type": "stop", "matched": done.tokens[-1].id}
