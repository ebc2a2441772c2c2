"""Who gets how much KV cache where models share a device."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tokenflow.errors import ModelLoadError
from tokenflow.wire.messages import Claim, DeviceShare, Grant

_LEAST = 256
"""Fewer tokens than this are of no use to anybody."""


class Shares:
    """Answers the claims of a recipe's workers, which come before they load anything.

    Nobody is answered before all have claimed: so it does not matter who starts first.  A worker that is
    started again gets what its predecessor had.

    :param wanted: the ``kv_cache`` of every model, None where it is to be chosen.
    """

    def __init__(self, wanted: Mapping[str, int | None]) -> None:
        self._wanted = wanted
        self._claims: dict[str, Claim] = {}
        self._granted: Mapping[str, int | None] = {}
        self._error = ""
        self._decided = asyncio.Event()

    async def grant(self, model: str, claim: Claim) -> Grant:
        """What a model gets; :raises ModelLoadError: if its device cannot hold all that share it."""
        self._claims.setdefault(model, claim)
        if not self._decided.is_set() and len(self._claims) == len(self._wanted):
            try:
                self._granted = divide(self._claims, self._wanted)
            except ModelLoadError as error:
                self._error = str(error)
            self._decided.set()
        await self._decided.wait()
        if self._error:
            raise ModelLoadError(self._error)
        return Grant(self._granted[model])


def divide(claims: Mapping[str, Claim], wanted: Mapping[str, int | None]) -> dict[str, int | None]:
    """Tokens of KV cache by model; None where an engine has made no claim and chooses for itself.

    What weights and caches of a given size leave of a device is divided in proportion to bytes per token, so
    that all models hold as many tokens: a request is in the books of all of them with its whole length.

    :raises ModelLoadError: if a device cannot hold its models.
    """
    granted = dict(wanted)
    rooms = {device: _room(device, claims, wanted) for device in _devices(claims)}
    for model, claim in claims.items():
        if wanted[model] is None and claim.shares:
            tokens = min(rooms[share.device] for share in claim.shares)
            granted[model] = min(tokens, claim.most_tokens)
    return granted


def _devices(claims: Mapping[str, Claim]) -> dict[str, None]:
    return {share.device: None for claim in claims.values() for share in claim.shares}


def _room(device: str, claims: Mapping[str, Claim], wanted: Mapping[str, int | None]) -> int:
    """Tokens that each model with a cache yet to be chosen gets of a device."""
    here = {
        model: share for model, claim in claims.items() for share in claim.shares if share.device == device
    }
    chosen = {model: share for model, share in here.items() if wanted[model] is None}
    usable = min(share.usable for share in here.values())
    cache = min(share.cache for share in here.values())
    taken = sum(share.weights + (wanted[model] or 0) * share.token for model, share in here.items())
    left = min(usable - taken, cache) if chosen else usable - taken
    each = left // sum(share.token for share in chosen.values()) if chosen else 0
    least = min(_LEAST, *(claims[model].most_tokens for model in chosen)) if chosen else 0
    if left < 0 or each < least:
        raise ModelLoadError(_arithmetic(device, here, wanted, usable, taken, least))
    return each


def _arithmetic(
    device: str,
    here: Mapping[str, DeviceShare],
    wanted: Mapping[str, int | None],
    usable: int,
    taken: int,
    least: int,
) -> str:
    lines = []
    for model, share in here.items():
        tokens = wanted[model]
        cache = (
            f"KV cache auto, {_size(share.token)} per token"
            if tokens is None
            else f"KV cache {tokens} tokens of {_size(share.token)} = {_size(tokens * share.token)}"
        )
        lines.append(f"\n  {model}: weights {_size(share.weights)}, {cache}")
    chosen = sum(share.token for model, share in here.items() if wanted[model] is None)
    more = f", {least} tokens of KV cache each {_size(least * chosen)} more" if chosen else ""
    return (
        f"{device} cannot hold its models: {_size(usable)} of it may be used, and they take "
        f"{_size(taken)}{more}:{''.join(lines)}\nchoose a smaller dtype or kv_cache, or another device"
    )


def _size(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
