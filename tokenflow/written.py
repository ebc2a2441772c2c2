"""Tokens of a response, made of what is noted of each: most callers want its text, and never look at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from tokenflow.types import Logprob, Token


def written(
    token: int, text: str, model: str, logprob: float | None, top: Sequence[tuple[int, float]]
) -> Token:
    """A token; ``top`` holds ids and log-probabilities."""
    return Token(token, text, model, logprob, tuple([Logprob(*pair) for pair in top]) if top else ())


class Written(Sequence[Token]):
    """All tokens of a response that is over: columns, of which a token is made when it is looked at.

    :param tops: ids and log-probabilities of the best tokens at each position.
    """

    __slots__ = ("_columns",)

    def __init__(
        self,
        ids: Sequence[int],
        texts: Sequence[str],
        models: Sequence[str],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[tuple[int, float]]],
    ) -> None:
        self._columns = (ids, texts, models, logprobs, tops)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[Token]:
        return map(written, *self._columns)

    @overload
    def __getitem__(self, index: int) -> Token: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Token, ...]: ...

    def __getitem__(self, index: int | slice) -> Token | tuple[Token, ...]:
        ids, texts, models, logprobs, tops = self._columns
        if isinstance(index, slice):
            parts = (ids[index], texts[index], models[index], logprobs[index], tops[index])
            return tuple(map(written, *parts))
        return written(ids[index], texts[index], models[index], logprobs[index], tops[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Written | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
