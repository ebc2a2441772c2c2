"""Tokens and log-probabilities as clients read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenflow.text.detokenizer import Detokenizer
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
        self.tokenizer = tokenizer
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
        return list(self.tokenizer.piece(token)) if token < len(self.tokenizer) else []

    def width(self, token: int) -> int:
        """The characters that a token is a part of."""
        known = self._widths.get(token)
        if known is None:
            known = self._widths[token] = _characters(self.bytes(token))
        return known

    def _spell(self, token: int) -> str:
        if self._as_ids or token >= len(self.tokenizer):
            return f"token_id:{token}"
        piece = self.tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Offsets:
    """Where in a text each token begins, in characters: with the first one that it is a part of.

    It reads the tokens themselves, since what is shown with one of them may have been held back before it.
    Those of a stop string have places as well, behind the end of the text.

    :param start: where the first token begins.
    :param special: special tokens show as they are spelled.
    """

    def __init__(self, speller: Speller, start: int = 0, *, special: bool = False) -> None:
        self._speller = speller
        self._detokenizer = Detokenizer(speller.tokenizer, special=special)
        self._end = start

    def next(self, token: int) -> int:
        """Where this token begins, which follows the last one."""
        known = token < len(self._speller.tokenizer)
        added = len(self._detokenizer.push((token,))) if known else 0
        # Before its own characters there may be one that was never completed.
        begin = self._end + max(0, added - self._speller.width(token))
        self._end += added
        return begin


def text_logprobs(tokens: Iterable[Token], speller: Speller, places: Offsets) -> dict[str, Any]:
    """The ``logprobs`` of a text completion, or of what a stream adds to it.

    ``top_logprobs`` always holds the token itself, with the same number.  ``models`` is ours.

    :param places: gives the offsets, and has seen the tokens before.
    """
    spelled: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    models: list[str] = []
    for token in tokens:
        name = speller.text(token.id)
        spelled.append(name)
        offsets.append(places.next(token.id))
        models.append(token.model)
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
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": spelled,
        "top_logprobs": tops,
        "models": models,
    }


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
