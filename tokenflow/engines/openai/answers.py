"""What an endpoint says of each token: which one it is, and the log-probabilities of the best ones there.

Endpoints differ.  vLLM and tokenflow write tokens as ``token_id:17`` when asked; SGLang gives ids of the
tokens it wrote, and texts for the alternatives; llama-server has an id in every entry; others have texts
only, which mean a token where exactly one of the vocabulary has that text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_BY_ID = "token_id:"
_ROUNDING = 1e-3
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Position:
    """A token, and the most probable ones at its place.

    :param best: (id, natural-log probability), the best first; the id is None where only a text is known
        that several tokens have.
    """

    token: int
    best: tuple[tuple[int | None, float], ...]


class Unreadable(Exception):
    """An answer that does not say which tokens it consists of."""


class Vocabulary:
    """Token ids by text, read when first asked for; ``size`` is how many ids there are."""

    def __init__(self, file: Path, size: int) -> None:
        self._file = file
        self._size = size

    def check(self, token: Any) -> int:
        """``token``, if it is an id; :raises Unreadable: if not."""
        if type(token) is not int:
            raise Unreadable(f"it gives {token!r} for a token id")
        if not 0 <= token < self._size:
            raise Unreadable(
                f"it gives token id {token}, and the model in the recipe has {self._size} tokens: is it the "
                "same model?"
            )
        return token

    def id_of(self, text: str) -> int | None:
        """The one token with this text; None if there is none or several."""
        return self._ids.get(text)

    def check_text(self, tokens: Sequence[int], text: str) -> None:
        """Refuse a text that these tokens do not have; :raises Unreadable: if it is another.

        Spaces do not count, which tokenizers may leave out, nor parts of characters, nor what is not shown.
        """
        there = "".join(text.split())
        shown = ["".join(self._text_of(tokens, skip).split()) for skip in (False, True)]
        if not any(_agree(here, there) for here in shown):
            raise Unreadable(
                f"it writes {text!r:.{_SHOWN}} for the token ids {list(tokens)}, and the model in the recipe "
                f"{shown[0]!r:.{_SHOWN}}: is it the same model?"
            )

    def _text_of(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file))

    @cached_property
    def _ids(self) -> Mapping[str, int | None]:
        ids: dict[str, int | None] = {}
        for token in sorted(self._tokenizer.get_vocab(with_added_tokens=True).values()):
            text = self._text_of([token])
            ids[text] = None if text in ids else token
        return ids


def _agree(here: str, there: str) -> bool:
    return "\ufffd" in here + there or here.startswith(there) or there.startswith(here)


def choices_of(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer, or of a piece of one; :raises Unreadable: if they are something else."""
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Unreadable(f"its choices are {json.dumps(choices):.{_SHOWN}}")
    return choices


def read_choice(choice: Mapping[str, Any], vocabulary: Vocabulary) -> list[Position]:
    """The tokens of a choice of ``/v1/completions``, or of a piece of one.

    :raises Unreadable: if they cannot be told.
    """
    try:
        return list(_positions(choice, vocabulary))
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise Unreadable(f"it wrote {json.dumps(choice):.{_SHOWN}} ({error})") from error


def _positions(choice: Mapping[str, Any], vocabulary: Vocabulary) -> Iterator[Position]:
    logprobs = choice.get("logprobs") or {}
    ids = choice.get("token_ids") or []
    if "content" in logprobs:
        yield from _entries(logprobs["content"] or [], vocabulary)
        return
    texts = logprobs.get("tokens") or []
    if not texts:
        if not ids and choice.get("text"):
            raise Unreadable("it gives a text without token ids or log-probabilities")
        yield from (Position(vocabulary.check(token), ()) for token in ids)
        return
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    values = logprobs.get("token_logprobs") or [None] * len(texts)
    for index, text in enumerate(texts):
        token = vocabulary.check(ids[index]) if index < len(ids) else _id_of(text, vocabulary)
        if token is None:
            raise Unreadable(f"it calls a token {text!r}, which is no single token of the vocabulary")

        def known(name: str, token: int = token, text: str = text) -> int | None:
            return token if name == text else _id_of(name, vocabulary)

        yield Position(token, _best(token, values[index], (tops[index] or {}).items(), known))


def _entries(entries: list[Mapping[str, Any]], vocabulary: Vocabulary) -> Iterator[Position]:
    """The form of chat completions, with ids in it if it is llama-server's."""
    for entry in entries:
        token = _id_in(entry, vocabulary)
        if token is None:
            raise Unreadable(f"it calls a token {entry.get('token')!r}, which is no token of the vocabulary")
        pairs = [(_id_in(top, vocabulary), top["logprob"]) for top in entry.get("top_logprobs") or []]
        yield Position(token, _best(token, entry.get("logprob"), pairs, lambda known: known))


def _best(
    token: int, logprob: float | None, pairs: Any, known: Callable[[Any], int | None]
) -> tuple[tuple[int | None, float], ...]:
    """What is listed, with the token itself, the best first and the token first among equals."""
    found = [(known(name), float(value)) for name, value in pairs if value is not None]
    if logprob is not None:
        # Under its own text there may be another token's value: texts are not unique.
        found = [(token, float(logprob)), *(pair for pair in found if pair[0] != token)]
    for _, value in found:
        if not value <= _ROUNDING:
            raise Unreadable(f"it gives {value:g} for a log-probability")
    return tuple(sorted(found, key=lambda pair: (-pair[1], pair[0] != token)))


def _id_in(entry: Mapping[str, Any], vocabulary: Vocabulary) -> int | None:
    return vocabulary.check(entry["id"]) if "id" in entry else _id_of(entry.get("token", ""), vocabulary)


def _id_of(text: str, vocabulary: Vocabulary) -> int | None:
    if text.startswith(_BY_ID) and text[len(_BY_ID) :].isdecimal():
        return vocabulary.check(int(text[len(_BY_ID) :]))
    return vocabulary.id_of(text)
