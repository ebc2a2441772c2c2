"""Token ids to text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tokenflow.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of a growing list of token ids; special tokens add nothing, unless ``special`` is set.

    What :meth:`push` returned, joined, plus :meth:`finish`, is ``tokenizer.decode`` of all ids.  A character
    spread over several tokens comes out whole with the last of them; bytes that can no longer become a
    character come out as U+FFFD.
    """

    __slots__ = ("_first", "_skipped", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._skipped: frozenset[int] = frozenset() if special else tokenizer.special_ids
        self._tokenizer = tokenizer
        self._utf8 = _Utf8("replace")
        self._first = True

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; return the text that is certain now.

        :raises ValueError: for an id outside the vocabulary.
        """
        text = []
        for token_id in ids:
            if token_id not in self._skipped:
                text.append(self._utf8.decode(self._tokenizer.piece(token_id, first=self._first)))
                self._first = False
        return "".join(text)

    def finish(self) -> str:
        """End the text; return U+FFFD for a character that stayed incomplete, else nothing."""
        return self._utf8.decode(b"", final=True)
