"""What every engine refuses before it computes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenflow.engines.base import Feed
from tokenflow.errors import EngineError


def check_feeds(
    feeds: Sequence[Feed], length: Callable[[int], int], context_length: int, vocab_size: int
) -> None:
    """Refuse a step that makes no sense.

    :param length: tokens that a slot holds; raises where it is not open.
    :raises EngineError: on no feeds, an empty one, a slot that occurs twice or is not open, too many tokens
        for the context, or ids outside the vocabulary.
    """
    if not feeds:
        raise EngineError("a step needs at least one extend")
    if len({feed.slot for feed in feeds}) < len(feeds):
        raise EngineError("a slot occurs twice in one step")
    for slot, tokens in feeds:
        held = length(slot)
        if not tokens:
            raise EngineError(f"slot {slot} is extended by no tokens")
        if held + len(tokens) > context_length:
            raise EngineError(
                f"slot {slot} holds {held} tokens; {len(tokens)} more exceed the context of {context_length}"
            )
        check_ids(tokens, vocab_size)


def check_score(tokens: Sequence[int], context_length: int, vocab_size: int) -> None:
    """Refuse to score fewer than two tokens, more than the context, or ids outside the vocabulary.

    :raises EngineError: in those cases.
    """
    count = len(tokens)
    if count < 2:
        raise EngineError(f"nothing to score: {count} token(s) given, at least 2 are needed")
    if count > context_length:
        raise EngineError(f"{count} tokens are more than the context of {context_length}")
    check_ids(tokens, vocab_size)


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; :raises EngineError: naming one."""
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise EngineError(f"token id {wrong} is outside the vocabulary of {vocab_size}")
