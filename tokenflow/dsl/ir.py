"""The one frozen form that every recipe compiles to, whatever it was written in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeVar

from tokenflow.dsl.wording import Path, key_path
from tokenflow.errors import Problem, Severity, TokenflowError
from tokenflow.types import ModelConfig

Send = Literal["keep", "drop_last"]
Policy = Literal["auto", "eager", "fixed", "planned", "lookahead"]
OnFailure = Literal["fail", "degrade"]
HeadDtype = Literal["float32", "bfloat16", "float16"]
HeadKind = Literal["r2r", "citer", "co_llm"]

Failure = TypeVar("Failure", bound=TokenflowError)

Expr = tuple[object, ...]
"""An expression tree of tuples, plain data on the wire; :mod:`tokenflow.dsl.expr` lists its nodes."""


@dataclass(frozen=True, slots=True)
class RuleIR:
    """Where ``when`` holds after a token was sampled, the request goes to model ``to``.

    ``send: keep`` commits the sampled token first; ``drop_last`` discards it, and the peer writes that
    position.  ``text`` is the expression as written.
    """

    when: Expr
    to: str
    send: Send
    text: str


@dataclass(frozen=True, slots=True)
class ModelIR:
    """One member of a recipe; ``code`` is its destination code, from 1 in recipe order."""

    name: str
    code: int
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class AssumeIR:
    """What batches are planned with until it is measured, all by model.

    ``latency_ms`` holds tables of (batch size, ms); ``routing`` shares of steps by destination (a number, or
    the name of a param); ``commits`` output tokens of such a step, where they are not what rules say.
    """

    latency_ms: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    routing: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    commits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchingIR:
    """When a model starts a batch: ``thresholds`` maps every model to the ready requests it waits for."""

    policy: Policy
    thresholds: Mapping[str, int]
    assume: AssumeIR = AssumeIR()


@dataclass(frozen=True, slots=True)
class HeadIR:
    """A learned router head, which reads the states of one ``model``.

    ``path`` is a local file or directory, made absolute, or text for the hub; empty where the head is part
    of the model's own checkpoint (``co_llm``).  Without a ``threshold`` the one stored with it counts.  It
    computes in ``dtype``.
    """

    name: str
    kind: HeadKind
    path: str
    threshold: float | None
    model: str
    dtype: HeadDtype = "float32"


@dataclass(frozen=True, slots=True)
class BudgetIR:
    """What a model may write of one response at most: a share of its tokens, a number of tokens, or both."""

    max_share: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PythonIR:
    """What a model's Python says: qualified names of definitions in ``file``, each None if there is none.

    ``route``, ``send`` and ``receive`` name functions.  ``router`` names a class that has all three as
    methods; ``peer`` is the model that its instances know as ``peer_idx``.  ``heads`` names the router
    heads that the route reads, and ``signals`` holds expressions that it reads by name.  ``text`` is what the
    file held when the recipe was compiled: that is imported, whatever becomes of the file; None for what it
    holds then.
    """

    file: str
    route: str | None = None
    send: str | None = None
    receive: str | None = None
    router: str | None = None
    peer: str | None = None
    heads: tuple[str, ...] = ()
    signals: Mapping[str, Expr] = field(default_factory=dict)
    text: bytes | None = field(default=None, repr=False, compare=False)

    @property
    def routes(self) -> bool:
        """Whether Python decides where a request goes, to any model, in place of rules."""
        return self.route is not None or self.router is not None


@dataclass(frozen=True, slots=True)
class Notes:
    """What is known of a recipe beside what it means.

    ``spots`` holds file, line and column (from 1; 0 for none) of what was written, by its path in the recipe.
    ``warnings`` holds what is no error, but hardly meant.
    """

    spots: Mapping[Path, tuple[str, int, int]] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()

    def problem(self, path: Path, message: str, severity: Severity = "error") -> Problem:
        """What is wrong with the value at ``path``, where it or the nearest value around it was written."""
        here = path
        while here and here not in self.spots:
            here = here[:-1]
        file, line, column = self.spots.get(here, ("<recipe>", 0, 0))
        return Problem(file, line, column, key_path(path), message, severity)

    def locate(self, path: Path, error: Failure) -> Failure:
        """An error of a message alone, which also says where the recipe asks for what failed, if it knows.

        The key path names the model, so a message that begins with its name need not.
        """
        problem = self.problem(path, str(error).removeprefix(f"model {path[-1]!r}: "))
        return type(error)(str(problem)) if problem.line else error


@dataclass(frozen=True, slots=True)
class RecipeIR:
    """A compiled recipe.

    ``entry`` names the model that reads the prompt and starts every response.  ``params`` are the recipe's
    named numbers with their defaults.  ``routes`` holds each model's rules in order: the first that fires
    decides, and a model without rules keeps its requests.  ``python`` holds what is written in Python, by
    model.  ``heads`` and ``budgets`` go by their names and by model.

    In an ensemble ``draw`` holds the weight (a number or arithmetic over params) of every model that may
    write, in recipe order: each token's writer is drawn by them.  ``routes`` say so for all tokens but the
    first, for which :func:`tokenflow.dsl.weights.first_writer` does.  Otherwise it is empty.

    Up to ``rollback`` tokens at the end of the output are tentative until a model with ``verify`` has seen
    them.  With ``rollback_to``, an ``at`` condition that holds where a step ends, what comes before the last
    step is final all the same.  ``on_failure`` says what happens when a model is given up: every request
    fails, or the other models go on without it.

    ``sampling`` holds settings for requests that do not give their own, by the names of
    :class:`tokenflow.types.SamplingParams`.  ``chat_template`` names the model whose template writes
    conversations, and ``scorer`` the one that scores prompts; empty if there is none.  ``source`` is the file
    that the recipe came from, empty if there is none; ``notes`` are no part of what the recipe means.
    """

    name: str
    entry: str
    models: tuple[ModelIR, ...]
    routes: Mapping[str, tuple[RuleIR, ...]]
    batching: BatchingIR
    params: Mapping[str, float] = field(default_factory=dict)
    python: Mapping[str, PythonIR] = field(default_factory=dict)
    heads: Mapping[str, HeadIR] = field(default_factory=dict)
    draw: tuple[tuple[str, Expr], ...] = ()
    budgets: Mapping[str, BudgetIR] = field(default_factory=dict)
    rollback: int = 0
    rollback_to: Expr | None = None
    on_failure: OnFailure = "fail"
    sampling: Mapping[str, float] = field(default_factory=dict)
    chat_template: str = ""
    scorer: str = ""
    source: str = ""
    description: str = ""
    notes: Notes = field(default=Notes(), compare=False, repr=False)

    def model(self, name: str) -> ModelIR:
        """The member called ``name``; :raises KeyError: if there is none."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)

    @property
    def verifier(self) -> str:
        """Name of the model that checks tentative tokens; empty if there is none."""
        return next((model.name for model in self.models if self.rollback and model.config.verify), "")

    @property
    def simulated(self) -> tuple[str, ...]:
        """Names of the models that a request can be at and that are simulated, in recipe order."""
        return tuple(name for name in self.reachable() if self.model(name).config.engine == "sim")

    def reachable(self) -> tuple[str, ...]:
        """Names of the models a request can ever be at, in recipe order.

        Every model leads to the one that checks: requests go there once no more may be tentative.
        """
        return self._reached({self.entry, *dict(self.draw)})

    def reachable_from(self, name: str) -> tuple[str, ...]:
        """Names of the models a request at model ``name`` can still be at, that one included."""
        return self._reached({name})

    def _reached(self, seen: set[str]) -> tuple[str, ...]:
        names = [model.name for model in self.models]
        seen |= {self.verifier} - {""}
        todo = list(seen)
        while todo:
            name = todo.pop()
            python = self.python.get(name)
            rules = (rule.to for rule in self.routes.get(name, ()))
            for to in names if python is not None and python.routes else rules:
                if to not in seen:
                    seen.add(to)
                    todo.append(to)
        return tuple(name for name in names if name in seen)


def to_json(recipe: RecipeIR) -> str:
    """The recipe as JSON, the same text for the same recipe: keys sorted, tuples as lists."""
    data = asdict(replace(recipe, notes=Notes()))
    del data["notes"]
    for python in data["python"].values():
        del python["text"]
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
