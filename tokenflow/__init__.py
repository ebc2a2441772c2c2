"""tokenflow: serve token-level LLM routing fast, and make it easy to program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenflow.types import Completion, SamplingParams, StreamEvent, Token

if TYPE_CHECKING:
    from tokenflow.router import Router

__all__ = ["Completion", "Router", "SamplingParams", "StreamEvent", "Token"]


def __getattr__(name: str) -> Any:
    # The router brings the event loop's machinery along; types and the command line's help must not wait.
    if name == "Router":
        from tokenflow.router import Router

        return Router
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
