"""Tokens and log-probabilities as clients read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenflow.text.tokenizer import Tokenizer
from tokenflow.types import Token

_LEAST = -9999.0
"""JSON has no minus infinity."""


class Speller:
    """How single tokens are written.

    Bytes that are not UTF-8 by themselves, such as half a character, are written as ``bytes:\\xe2\\x82``, and
    what the tokenizer does not know (logits may be wider) as ``token_id:17``.

    :param as_ids: write all of them so.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._known: dict[int, str] = {}
        self._widths: dict[int, int] = {}

    def text(self, token: int) -> str:
        """A token by itself."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._spell(token)
        return known

    def bytes(self, token: int) -> list[int]:
        """The bytes that a token adds to a text."""
        return list(self._tokenizer.piece(token)) if token < len(self._tokenizer) else []

    def width(self, token: int) -> int:
        """The characters that a token is a part of."""
        known = self._widths.get(token)
        if known is None:
            known = self._widths[token] = _characters(self.bytes(token))
        return known

    def _spell(self, token: int) -> str:
        if self._as_ids or token >= len(self._tokenizer):
            return f"token_id:{token}"
        piece = self._tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def text_logprobs(tokens: Iterable[Token], speller: Speller, offset: int) -> tuple[dict[str, Any], int]:
    """The ``logprobs`` of a text completion, and where in the text its next token begins.

    ``top_logprobs`` always holds the token itself, with the same number.  ``models`` is ours.

    :param offset: where in the text the first token begins.
    """
    spelled: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    models: list[str] = []
    for token in tokens:
        name = speller.text(token.id)
        spelled.append(name)
        # Its text may begin with what was held back before it, lest it become a stop string.
        offsets.append(offset + max(0, len(token.text) - speller.width(token.id)))
        models.append(token.model)
        offset += len(token.text)
        if token.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        value = number(token.logprob)
        values.append(value)
        top = {name: value}
        for best in token.top_logprobs:
            if best.id != token.id:
                other = speller.text(best.id)
                top[other if other not in top else f"token_id:{best.id}"] = number(best.logprob)
        tops.append(top)
    logprobs = {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": spelled,
        "top_logprobs": tops,
        "models": models,
    }
    return logprobs, offset


def chat_logprobs(tokens: Sequence[Token], speller: Speller) -> dict[str, Any]:
    """The ``logprobs`` of a chat completion; ``model`` is ours."""
    return {
        "content": [
            {
                **_entry(speller, token.id, token.logprob or 0.0),
                "top_logprobs": [_entry(speller, best.id, best.logprob) for best in token.top_logprobs],
                "model": token.model,
            }
            for token in tokens
        ]
    }


def number(logprob: float) -> float:
    """A log-probability that JSON can write."""
    return max(logprob, _LEAST)


def _characters(piece: Sequence[int]) -> int:
    """How many characters of UTF-8 have bytes in a piece of it: the first one may have begun before."""
    continues = [byte & 0xC0 == 0x80 for byte in piece]
    return continues.count(False) + (1 if continues[:1] == [True] else 0)


def _entry(speller: Speller, token: int, logprob: float) -> dict[str, Any]:
    return {"token": speller.text(token), "logprob": number(logprob), "bytes": speller.bytes(token)}
