"""The parts that answers have in common: ids, usage, and what is ours in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tokenflow.types import Completion, Token

Ours = dict[str, Any]
End = tuple[str | None, int | str | UnsetType | None]
"""``finish_reason`` and ``stop_reason`` of a choice."""

ANY_TEXT = "\0any text\0"
"""What nothing else in an event can be: names and ids come from command lines and headers."""


class Usage(Struct, frozen=True):
    """Token counts of a whole request; a prompt counts once, whatever ``n`` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: dict[str, int]


def usage(prompt_tokens: int, completions: Sequence[Completion], verifying: frozenset[str]) -> Usage:
    """What a request cost.

    Discarded tokens are ``rejected_prediction_tokens``; ``accepted_prediction_tokens`` are those that were
    drafted for a model that checks them.

    :param verifying: the models that check drafts.
    """
    written = sum(completion.usage.completion_tokens for completion in completions)
    by_model = _by_model(completions)
    drafts = sum(count for name, count in by_model.items() if name not in verifying) if verifying else 0
    dropped = sum(completion.usage.dropped for completion in completions)
    details = {"accepted_prediction_tokens": drafts, "rejected_prediction_tokens": dropped}
    return Usage(prompt_tokens, written, prompt_tokens + written, details)


def finish(done: Completion | None) -> End:
    """Why a response ended; there is no ``stop_reason`` while it goes on."""
    return (None, UNSET) if done is None else (done.finish_reason, done.stop_reason)


def ours(completions: Sequence[Completion]) -> Ours:
    """The ``tokenflow`` key of an answer: who wrote how much of it, and whether that was simulated."""
    return {
        **simulated(completions),
        "tokens": dict(_by_model(completions)),
        "handoffs": sum(completion.usage.handoffs for completion in completions),
        "dropped": sum(completion.usage.dropped for completion in completions),
        "seeds": [completion.seed for completion in completions],
    }


def simulated(completions: Sequence[Completion]) -> Ours:
    """A remark where models are simulated: their texts mean nothing."""
    return {"simulated": True} if any(completion.simulated for completion in completions) else {}


class Extras(Struct, frozen=True):
    """What a client may ask for beside the text, per token."""

    token_ids: bool = False
    models: bool = False

    def __bool__(self) -> bool:
        return self.token_ids or self.models

    def ids(self, tokens: Sequence[Token]) -> list[int] | UnsetType:
        """Their ids, if wanted."""
        return [token.id for token in tokens] if self.token_ids else UNSET

    def writers(self, tokens: Sequence[Token]) -> Ours | UnsetType:
        """The ``tokenflow`` key of a choice: who wrote each token, if wanted."""
        return {"models": [token.model for token in tokens]} if self.models else UNSET


class Mould:
    """An event of which only the text changes, as nearly all of a stream do: it is encoded once.

    :param event: one whose text is :data:`ANY_TEXT`.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, event: bytes) -> None:
        self._before, _, self._after = event.partition(msgspec.json.encode(ANY_TEXT))

    def cast(self, text: str) -> bytes:
        """The event with this text."""
        return b"%b%b%b" % (self._before, msgspec.json.encode(text), self._after)


def _by_model(completions: Sequence[Completion]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for completion in completions:
        counts.update(completion.usage.by_model)
    return counts
