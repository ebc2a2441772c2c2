"""Counter-based random numbers: a pure function of what is drawn, for whom and where.

A number depends on (seed, choice, position, model, purpose) and on nothing else: not on batch rows, request
ids, time, or on how often it is asked for.  A request therefore repeats itself alone, in company and after
a recovery (the idea of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

from hashlib import blake2b
from struct import pack

DRAW = "draw"
"""Purpose of the number that routing rules see: one per output position, whichever model asks (model 0)."""

_64_BITS = 2**64 - 1


def uniform(seed: int, choice: int, position: int, model: int, purpose: str) -> float:
    """A number in [0, 1) with 53 random bits.

    :param seed: the request's 64-bit seed, signed or not.
    :param choice: index of the response among several to one prompt.
    :param position: output position that is decided.
    :param model: code of the model that decides.
    :param purpose: what is decided; other purposes give independent numbers.
    """
    key = pack("<4Q", seed & _64_BITS, choice, position, model)
    digest = blake2b(purpose.encode(), digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
