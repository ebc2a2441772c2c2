"""tokenflow: serve token-level LLM routing fast, and make it easy to program."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenflow.types import Completion, SamplingParams, StreamEvent, Token

if TYPE_CHECKING:
    from tokenflow.dsl.base import BaseRouter
    from tokenflow.dsl.messages import PeerReq
    from tokenflow.dsl.recipe import Recipe
    from tokenflow.router import Router

__all__ = [
    "BaseRouter",
    "Completion",
    "PeerReq",
    "Recipe",
    "Router",
    "SamplingParams",
    "StreamEvent",
    "Token",
]

# The router brings the event loop's machinery along; types and the command line's help must not wait.
_LATE = {
    "BaseRouter": "tokenflow.dsl.base",
    "PeerReq": "tokenflow.dsl.messages",
    "Recipe": "tokenflow.dsl.recipe",
    "Router": "tokenflow.router",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
