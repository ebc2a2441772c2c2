"""A recipe's own ``send`` and ``receive``, called for one request and held to their contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from tokenflow.dsl import overdue
from tokenflow.dsl.base import BaseRouter
from tokenflow.dsl.ir import PythonIR, RecipeIR
from tokenflow.dsl.messages import PeerReq, RequestView
from tokenflow.dsl.wording import show
from tokenflow.errors import Problem, RecipeError, RouteFailed
from tokenflow.wire.code import ImportFailed, failure, find, place

_MOST_ROUTERS = 256
"""Objects of a class kept per model, one for each set of parameter values; older ones are made anew."""


@dataclass(frozen=True, slots=True)
class Handler:
    """A function or method of a recipe: how to call it, for how many seconds, and what messages say of it."""

    call: Callable[..., object]
    name: str
    file: str
    longest_s: float = overdue.LONGEST_S


@dataclass(frozen=True, slots=True)
class Handlers:
    """What a recipe's Python says of the hand-offs of one model; None where the default holds.

    By default ``send`` keeps the sampled token and ``receive`` accepts all.
    """

    send: Handler | None = None
    receive: Handler | None = None


def load_handlers(recipe: RecipeIR, model: str) -> Handlers:
    """Import the ``send`` and ``receive`` of a model.

    :raises RecipeError: if the recipe's file cannot be imported any more.
    """
    python = recipe.python.get(model)
    if python is None:
        return Handlers()
    try:
        if python.router is not None:
            return _methods(recipe, model, python, find(python.file, python.router, python.text))
        return Handlers(
            send=_function(recipe, model, python, "send", python.send),
            receive=_function(recipe, model, python, "receive", python.receive),
        )
    except ImportFailed as error:
        problem = Problem(error.file, error.line, error.column, f"models.{model}", error.message)
        raise RecipeError([problem]) from error


def call_send(handler: Handler, view: RequestView) -> PeerReq:
    """Ask for the message to ``view.peer``.

    :raises RouteFailed: if the function fails, or its message is not what the peer has not seen of the
        request, with or without the sampled token.
    """
    message = _ask(handler, view)
    if not isinstance(message, PeerReq):
        _fail(
            handler,
            f"returned {show(message)}: return req.keep(), req.drop_last() or a PeerReq of your own",
        )
    length = len(view)
    _check_message(handler, message, view)
    if message.loc not in (length - 1, length):
        _fail(
            handler,
            f"returned loc {message.loc}: the request has {length} tokens, so {length} keeps the sampled "
            f"token and {length - 1} drops it",
        )
    seen = view.peer_locs[view.peer] or 0
    if message.base > seen:
        _fail(
            handler,
            f"returned tokens from index {message.base}, but the peer has seen only {seen}: send all after "
            "those",
        )
    if message.finished != view.finished():
        _fail(
            handler,
            f"returned finished={message.finished!r}: pass req.finished(); the peers of a response that ends "
            "are told by the runtime",
        )
    return message


def call_receive(handler: Handler, message: PeerReq, view: RequestView, final: int) -> int:
    """Ask how much of a message to take; answers the length of the request after it.

    :param view: the request with the message's tokens at its end.
    :param final: how many leading tokens of the request cannot be taken back.
    :raises RouteFailed: if the function fails, or its answer is not a beginning of the request that holds
        what is final.
    """
    answer = _ask(handler, message, view)
    if answer is None:
        return len(view)
    if not isinstance(answer, PeerReq):
        _fail(handler, f"returned {show(answer)}: return None to accept all tokens, or a PeerReq")
    _check_message(handler, answer, view)
    if answer.loc > len(view):
        _fail(handler, f"returned loc {answer.loc}: the request has only {len(view)} tokens")
    if answer.loc < final:
        _fail(
            handler,
            f"takes back all but {answer.loc} tokens, of which {final} are final: a recipe declares with "
            '"rollback" how many tokens stay tentative',
        )
    return answer.loc


def _function(recipe: RecipeIR, model: str, python: PythonIR, role: str, name: str | None) -> Handler | None:
    if name is None:
        return None
    function = find(python.file, name, python.text)
    return _handler(recipe, model, python, role, function, function)


def _methods(recipe: RecipeIR, model: str, python: PythonIR, router: type[BaseRouter]) -> Handlers:
    index = recipe.model(model).code
    peer_idx = recipe.model(python.peer).code if python.peer is not None else None

    @lru_cache(_MOST_ROUTERS)
    def build(params: tuple[tuple[str, float], ...]) -> BaseRouter:
        return router.build(index=index, peer_idx=peer_idx, params=dict(params))

    def for_request(params: Mapping[str, float]) -> BaseRouter:
        return build(tuple(params.items()))

    def send(view: RequestView) -> object:
        return for_request(view.params).send(view)

    def receive(message: PeerReq, view: RequestView) -> object:
        return for_request(view.params).receive(message)

    def handler(role: str, call: Callable[..., object]) -> Handler | None:
        own = getattr(router, role)
        if own is getattr(BaseRouter, role):
            return None
        return _handler(recipe, model, python, role, call, own)

    return Handlers(handler("send", send), handler("receive", receive))


def _handler(
    recipe: RecipeIR,
    model: str,
    python: PythonIR,
    role: str,
    call: Callable[..., object],
    definition: Callable[..., Any],
) -> Handler:
    overdue.prepare()
    name = f"recipe {recipe.name!r}: {role} of model {model!r} ({place(definition)})"
    longest_s = min(overdue.LONGEST_S, recipe.model(model).config.step_timeout)
    return Handler(call, name, python.file, longest_s)


def _ask(handler: Handler, *arguments: object) -> object:
    try:
        return overdue.call(handler.name, handler.longest_s, handler.call, *arguments)
    except BaseException as error:  # whatever it is, it is this function's, and this request's
        raise RouteFailed(f"{handler.name} {failure(error, handler.file)}") from error


def _fail(handler: Handler, what: str) -> NoReturn:
    raise RouteFailed(f"{handler.name} {what}")


def _check_message(handler: Handler, message: PeerReq, view: RequestView) -> None:
    """The message is about this request, and its tokens stand there where it says they begin."""
    if message.rid != view.rid:
        _fail(handler, f"returned a message of request {message.rid!r} for request {view.rid}: pass req.rid")
    loc, tokens = message.loc, message.token_ids
    if type(loc) is not int:
        _fail(handler, f"returned loc {show(loc)}: a length is a whole number")
    if not isinstance(tokens, list | tuple):
        _fail(handler, f"returned token_ids {show(tokens)}: a list of token ids is needed")
    if message.base < 0:
        _fail(handler, f"returned {len(tokens)} tokens with loc {loc}, which would begin before the request")
    expected = _slice(view, message.base, loc)
    for index, token in enumerate(tokens):
        if type(token) is not int:
            _fail(handler, f"returned {show(token)} as token {index}: token ids are whole numbers")
        if index < len(expected) and token != expected[index]:
            _fail(
                handler,
                f"returned token id {token} for index {message.base + index} of the request, which holds "
                f"{expected[index]}: a message cannot change tokens",
            )


def _slice(view: RequestView, start: int, end: int) -> Sequence[int]:
    part = list(view.tokens[start:end])
    if view.sampled is not None and start <= len(view.tokens) < end:
        part.append(view.sampled)
    return part
