"""What models of a recipe say to each other about one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow.dsl.ir import Send


@dataclass(frozen=True, slots=True)
class PeerReq:
    """A hand-off: the token ids that the peer has not seen.

    ``token_ids`` is the suffix after the peer's anchor and ``loc`` the length of the whole sequence so
    far, so the suffix begins at :attr:`base`.  A ``loc`` that covers the token just sampled keeps that
    token; a ``loc`` that ends before it drops it, and the peer writes that position.
    """

    rid: int
    token_ids: Sequence[int]
    loc: int
    finished: bool = False

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
