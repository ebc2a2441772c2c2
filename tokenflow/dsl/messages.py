"""What models of a recipe say to each other about one request, and what a recipe sees of it then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index as whole
from typing import Any, overload

from tokenflow.dsl.ir import Send


class Tokens(Sequence[int]):
    """The first ``length`` ids of a request, to be read: a recipe sees the router's own list through it.

    A slice is a list of the caller's own.  Nothing is copied before; contexts are long.
    """

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: list[int], length: int) -> None:
        self._ids = ids
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._ids, self._length)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step == 1:
                return self._ids[start:stop]
            return [self._ids[at] for at in range(start, stop, step)]
        at = whole(index)
        if not -self._length <= at < self._length:
            raise IndexError(f"token {at} of {self._length}")
        return self._ids[at if at >= 0 else at + self._length]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


@dataclass(frozen=True, slots=True, init=False)
class PeerReq:
    """A hand-off: the token ids that the peer has not seen.

    ``token_ids`` is the suffix after the peer's anchor and ``loc`` the length of the whole sequence so
    far, so the suffix begins at :attr:`base`.  A ``loc`` that covers the token just sampled keeps that
    token; a ``loc`` that ends before it drops it, and the peer writes that position.  Whatever else is
    given by name is an attribute of the message, for the peer's ``receive``.
    """

    rid: int
    token_ids: Sequence[int]
    loc: int
    finished: bool
    extra: Mapping[str, Any]

    def __init__(
        self, rid: int, token_ids: Sequence[int], loc: int, finished: bool = False, **extra: Any
    ) -> None:
        if "base" in extra or "extra" in extra:
            raise TypeError('a PeerReq has "base" and "extra" already: choose other names for its own fields')
        put = object.__setattr__
        put(self, "rid", rid)
        # What is sent stays as it is when the request goes on.
        put(self, "token_ids", token_ids[:] if isinstance(token_ids, Tokens) else token_ids)
        put(self, "loc", loc)
        put(self, "finished", finished)
        put(self, "extra", extra)

    def __getattr__(self, name: str) -> Any:
        if name != "extra" and name in self.extra:
            return self.extra[name]
        raise AttributeError(f"this PeerReq has no field {name!r}", name=name, obj=self)

    @property
    def base(self) -> int:
        """Where the suffix begins."""
        return self.loc - len(self.token_ids)


def send(rid: int, tokens: Sequence[int], sampled: int, anchor: int, how: Send) -> PeerReq:
    """The message of a rule with ``send: keep`` or ``send: drop_last``.

    ``tokens`` are the committed ids (prompt and output), ``sampled`` the id just sampled, and ``anchor``
    how many leading ids the peer is known to have seen.
    """
    if how == "keep":
        return PeerReq(rid, [*tokens[anchor:], sampled], len(tokens) + 1)
    return PeerReq(rid, tokens[anchor:], len(tokens))


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as ``send`` and ``receive`` see it; good for the duration of the call.

    :param rid: the request's id, for :class:`PeerReq`.
    :param tokens: the committed ids, prompt and output; they can be read and sliced, not changed.
    :param prompt_tokens: how many of them are the prompt.
    :param sampled: the id just sampled, not committed yet; None in ``receive``.
    :param peer: code of the model at the other end of the hand-off.
    :param peer_locs: by model code, how many leading ids that model has been told of, None for nothing.
    :param params: the recipe's parameters with this request's values.
    :param ended: whether the response is over.
    """

    rid: int
    tokens: Sequence[int]
    prompt_tokens: int
    sampled: int | None
    peer: int
    peer_locs: Sequence[int | None]
    params: Mapping[str, float]
    ended: bool = False

    def __len__(self) -> int:
        return len(self.tokens) + (self.sampled is not None)

    @property
    def origin_input_ids(self) -> list[int]:
        """The ids of the prompt."""
        return list(self.tokens[: self.prompt_tokens])

    @property
    def output_ids(self) -> list[int]:
        """The ids of the output; in ``send`` they end in the one just sampled."""
        output = list(self.tokens[self.prompt_tokens :])
        return output if self.sampled is None else [*output, self.sampled]

    def finished(self) -> bool:
        """Whether the response is over."""
        return self.ended

    def keep(self, **extra: Any) -> PeerReq:
        """All that the peer has not seen, with the sampled token: it is committed."""
        return self._message(len(self), extra)

    def drop_last(self, **extra: Any) -> PeerReq:
        """What the peer has not seen, without the sampled token: the peer writes its position."""
        return self._message(len(self.tokens), extra)

    def _message(self, loc: int, extra: Mapping[str, Any]) -> PeerReq:
        new = list(self.tokens[self.peer_locs[self.peer] or 0 :])
        if loc > len(self.tokens) and self.sampled is not None:
            new.append(self.sampled)
        return PeerReq(self.rid, new, loc, self.ended, **extra)
