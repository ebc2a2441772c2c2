"""Every error that tokenflow raises on purpose, as one tree.

::

    TokenflowError
    ├─ RecipeError             the recipe is wrong; ``problems`` lists everything found
    ├─ PlanError               a routing model, thresholds or a concurrency that cannot be planned with
    ├─ RequestError            one request is wrong or failed; the others go on
    │  ├─ InvalidRequest       refused before it started (bad prompt, sampling value, parameter)
    │  │  └─ ContextTooLong    the prompt cannot fit the recipe's context or KV cache
    │  ├─ RouteFailed          the recipe's own logic failed (livelock, wrong destination, bad receive)
    │  ├─ NonFiniteLogits      a model produced NaN or infinity for this request
    │  ├─ DeadlyRequest        worker after worker died while it ran this request
    │  ├─ EndpointFailed       the endpoint that a model runs on did not answer, or refused
    │  ├─ RequestCancelled     the request was aborted by its owner or by a shutdown
    │  ├─ RequestTimeout       the request did not end within its time
    │  └─ Overloaded           too many requests wait already; try again later
    ├─ ModelLoadError          a model, its weights or its tokenizer cannot be loaded or used
    │  ├─ UnsupportedModel     an architecture or option that the engine does not implement
    │  ├─ ModelNotFound        a path or hub id that cannot be had
    │  └─ TokenizerMismatch    two models of a recipe do not share one vocabulary
    ├─ EngineError             an engine broke its protocol or its device failed
    ├─ WorkerDied              a worker process ended; says model, pid, cause and its last stderr lines
    ├─ ProtocolError           a frame that cannot be decoded or does not fit the conversation
    └─ RouterClosed            the router is not running (not started, draining or stopped)

Errors cross processes as data (:class:`tokenflow.wire.messages.Failure`), never as pickles; each
waiter gets a fresh exception.  Messages say what, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


class TokenflowError(Exception):
    """Base class of every error that tokenflow raises on purpose."""


Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a recipe, or hardly meant as it is (a ``warning``).

    ``file``, ``line`` and ``column`` (both from 1; 0 where unknown) say where; ``path`` is the key path
    inside the recipe (``routes.slm[0].when``, may be empty); ``message`` says what, and what to do.
    """

    file: str
    line: int
    column: int
    path: str
    message: str
    severity: Severity = "error"

    @property
    def where(self) -> str:
        """File, line and column, as editors read them."""
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def __str__(self) -> str:
        what = f"{self.path}: {self.message}" if self.path else self.message
        return f"{self.where}: {self.severity}: {what}"


class RecipeError(TokenflowError):
    """The recipe is wrong; every problem found is listed, one line each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        summary = f"{count} problem{'' if count == 1 else 's'}"
        super().__init__("\n".join([*map(str, self.problems), summary]))


class PlanError(TokenflowError, ValueError):
    """A routing model, thresholds or a concurrency that cannot be planned with."""


class RequestError(TokenflowError):
    """One request is wrong or failed; the others go on."""


class InvalidRequest(RequestError):
    """The request was refused before it started; ``param`` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class ContextTooLong(InvalidRequest):
    """The prompt does not fit the smallest context of the recipe, or a KV cache."""


class RouteFailed(RequestError):
    """The recipe's own logic failed for this request."""


class NonFiniteLogits(RequestError):
    """A model produced NaN or infinity for this request."""


class DeadlyRequest(RequestError):
    """Worker after worker died while it ran this request: to try it again would cost some more."""


class EndpointFailed(RequestError):
    """The endpoint that a model runs on did not answer for this request, or refused."""


class RequestCancelled(RequestError):
    """The request was aborted by its owner or by a shutdown."""


class RequestTimeout(RequestError):
    """The request did not end within its time."""


class Overloaded(RequestError):
    """Too many requests wait already; this one was refused before any work was done for it."""


class ModelLoadError(TokenflowError):
    """A model, its weights or its tokenizer cannot be loaded or used."""


class UnsupportedModel(ModelLoadError):
    """An architecture or option that the engine does not implement."""


class ModelNotFound(ModelLoadError):
    """A path or hub id that cannot be had."""


class TokenizerMismatch(ModelLoadError):
    """Two models of a recipe do not share one vocabulary."""


class EngineError(TokenflowError):
    """An engine broke its protocol or its device failed."""


class WorkerDied(TokenflowError):
    """A worker process ended while it was needed."""


class ProtocolError(TokenflowError):
    """A frame that cannot be decoded or does not fit the conversation."""


class RouterClosed(TokenflowError):
    """The router is not running: not started, draining or stopped."""


def rebuild(kind: str, message: str) -> TokenflowError:
    """Make a fresh exception from an error that crossed a process boundary.

    ``kind`` is the class name sent by the other side; an unknown kind (a newer worker, say) becomes
    :class:`EngineError`, so that nothing is lost.
    """
    cls = _BY_NAME.get(kind)
    return cls(message) if cls is not None else EngineError(f"{kind}: {message}")


def _tree(root: type[TokenflowError]) -> list[type[TokenflowError]]:
    return [root, *(cls for sub in root.__subclasses__() for cls in _tree(sub))]


_BY_NAME = {cls.__name__: cls for cls in _tree(TokenflowError) if cls is not RecipeError}
