"""Recipes written in Python: models with decorated functions, with classes, or with rules as in YAML.

::

    recipe = Recipe("r-stitch", entry="slm", params={"tau": 0.03})
    slm = recipe.model("slm", "Qwen/Qwen3-0.6B")
    llm = recipe.model("llm", "Qwen/Qwen3-32B")

    @slm.route
    def uncertain(result, tau):
        return torch.where(result.entropy() > tau, llm.index, 0)

    @slm.send
    def without_last(req):
        return req.drop_last()

    llm.rules([{"when": "entropy <= tau", "to": "slm", "send": "keep"}])

The file is imported in every worker as well, so this module loads nothing heavy, and a recipe only notes
what it is given: all of it is checked by :meth:`Recipe.compile`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

from tokenflow.dsl.ir import RecipeIR

Role = Literal["route", "send", "receive"]
Function = TypeVar("Function", bound=Callable[..., Any])


class Place(NamedTuple):
    """Where a call was written; line and column count from 1."""

    file: str
    line: int
    column: int


class Definition(NamedTuple):
    """A function that was decorated, and where."""

    role: Role
    function: Callable[..., Any]
    place: Place


class Recipe:
    """A recipe written in Python; ``tokenflow run`` takes the one that its file calls ``recipe``.

    :param name: of the recipe.
    :param entry: name of the model that starts every response.
    :param params: named numbers with their defaults, for rules, routes and ``--set``.
    :param batching: as in YAML, ``{"policy": "fixed", "thresholds": {"llm": 4}}``.
    :param heads: router heads by name, as in YAML.
    :param draw: weights by model, as in YAML: every token's writer is drawn.
    :param budgets: what a model may write at most, as in YAML.
    :param rollback: how many tokens at the end of the output are tentative.
    :param rollback_to: a text that ends a step, as in YAML: what comes before the last step is final.
    :param on_failure: as in YAML, ``fail`` or ``degrade``.
    :param sampling: settings for requests that do not give their own, as in YAML.
    :param chat_template: name of the model whose chat template is used; the entry's if there is none.
    :param scorer: name of the model that scores prompts.
    :param description: one sentence for people.
    """

    def __init__(
        self,
        name: str,
        *,
        entry: str | None = None,
        params: Mapping[str, float] | None = None,
        batching: Mapping[str, Any] | None = None,
        heads: Mapping[str, Any] | None = None,
        draw: Mapping[str, Any] | None = None,
        budgets: Mapping[str, Any] | None = None,
        rollback: int | None = None,
        rollback_to: str | None = None,
        on_failure: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        scorer: str | None = None,
        description: str | None = None,
    ) -> None:
        given = {
            "name": name,
            "description": description,
            "entry": entry,
            "params": params,
            "batching": batching,
            "heads": heads,
            "draw": draw,
            "budgets": budgets,
            "rollback": rollback,
            "rollback_to": rollback_to,
            "on_failure": on_failure,
            "sampling": sampling,
            "chat_template": chat_template,
            "scorer": scorer,
        }
        self.data = {key: value for key, value in given.items() if value is not None}
        self.place = _caller()
        self.models: list[Model] = []

    def model(
        self,
        name: str,
        path: str | os.PathLike[str] | None = None,
        *,
        router: type | None = None,
        peer: str | None = None,
        heads: Sequence[str] = (),
        signals: Mapping[str, str] | None = None,
        **config: Any,
    ) -> Model:
        """Add a model.

        :param path: a local directory, relative to the recipe's file, or a hub id.
        :param router: the model's class, a :class:`tokenflow.BaseRouter`.
        :param peer: the model whose code the router's objects know as ``peer_idx``.
        :param heads: names of the router heads that the model's route reads.
        :param signals: expressions, as in YAML, that the model's route reads by name: as an argument of the
            function, or with ``result.signal(name)``.  What they remember belongs to the request, through
            hand-offs and restarts.
        :param config: what a model has in YAML: ``dtype``, ``device``, ``engine`` and so on.
        """
        settings = config if path is None else {"path": _plain(path), **config}
        model = Model(name, len(self.models) + 1, settings, _caller(), router, peer, heads, signals or {})
        self.models.append(model)
        return model

    def compile(self, source: str = "", overrides: Sequence[str] = ()) -> RecipeIR:
        """Check all of the recipe and make the frozen form that is run.

        :param source: the recipe's file as its user calls it.
        :param overrides: changes as ``key.path=value``, as with ``--set``.
        :raises RecipeError: with every problem found.
        """
        # What checks a recipe is slow to import, and a worker only needs its functions.
        from tokenflow.dsl.python import compile_recipe

        return compile_recipe(self, source, overrides)


@dataclass(eq=False, slots=True)
class Model:
    """One model of a recipe; ``index`` is its destination code.

    Functions are given to it with decorators.  They stand at the top level of the recipe's file, since
    workers import them by name.
    """

    name: str
    index: int
    config: Mapping[str, Any]
    place: Place
    router: type | None
    peer: str | None
    heads: Sequence[str]
    signals: Mapping[str, str]
    definitions: list[Definition] = field(default_factory=list)
    rule_lists: list[tuple[list[Any], Place]] = field(default_factory=list)

    def route(self, function: Function) -> Function:
        """Decorate the function that says where requests go after a step at this model.

        It gets a :class:`tokenflow.routing.python.Result` and, by their names, those of the recipe's
        parameters (float32) and of the model's signals that it asks for, each a tensor [B].  It returns
        destination codes, a tensor of integers [B] or a list: 0 to stay, or a model's ``index``.
        """
        return self._define("route", function)

    def send(self, function: Function) -> Function:
        """Decorate the function that makes the message when a request leaves this model.

        It gets a :class:`tokenflow.dsl.messages.RequestView` and returns a :class:`tokenflow.PeerReq`.
        Without one, the sampled token is kept and all is sent.
        """
        return self._define("send", function)

    def receive(self, function: Function) -> Function:
        """Decorate the function that takes a message when a request comes to this model.

        It gets the message and the request with the message's tokens, and returns None to accept all of
        them, as without a function, or a message that ends earlier.
        """
        return self._define("receive", function)

    def rules(self, rules: Iterable[Mapping[str, Any]]) -> None:
        """Give the model rules, as in YAML, in place of a route."""
        self.rule_lists.append((list(rules), _caller()))

    def _define(self, role: Role, function: Function) -> Function:
        self.definitions.append(Definition(role, function, _caller(3)))
        return function


def _plain(path: str | os.PathLike[str]) -> object:
    """A path as text; what is no path is left for the checks."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _caller(depth: int = 2) -> Place:
    """Where the function was called that calls this one."""
    frame = sys._getframe(depth)
    code = frame.f_code
    line, _, column, _ = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    return Place(code.co_filename, line or frame.f_lineno, (column or 0) + 1)
