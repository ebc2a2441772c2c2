"""Where the output ends in a given text: the conditions ``at`` and ``follows``, over token ids.

A text is a list of id sequences, any of which will do: single ids that contain it, and the ids that spell it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from tokenflow.routing.signals import Signals

Run = Callable[[Signals], Tensor]


def at(sequences: Sequence[Sequence[int]]) -> tuple[Run, int]:
    """Whether the output, ending in the sampled token, ends in one of the sequences, bool [B].

    Comes with the number of tokens before the sampled one that it looks at.
    """
    singles, longer = _sorted_out(sequences)

    def run(signals: Signals) -> Tensor:
        token = signals.token
        matches = [torch.isin(token, ids(token)) for ids in singles]
        for length, ids in longer:
            written = torch.cat((signals.tails[:, 1 - length :], token.unsqueeze(1)), 1)
            matches.append((written == ids(token)).all(1))
        return reduce(torch.logical_or, matches)

    return run, max((length - 1 for length, _ in longer), default=0)


def follows(sequences: Sequence[Sequence[int]]) -> tuple[Run, int]:
    """Whether the output before the sampled token is empty or ends in one of the sequences, bool [B].

    Comes with the number of tokens before the sampled one that it looks at.
    """
    singles, longer = _sorted_out(sequences)

    def run(signals: Signals) -> Tensor:
        last = signals.tails[:, -1]
        matches = [last < 0, *(torch.isin(last, ids(last)) for ids in singles)]
        matches += [(signals.tails[:, -length:] == ids(last)).all(1) for length, ids in longer]
        return reduce(torch.logical_or, matches)

    return run, max((length for length, _ in longer), default=1)


Placed = Callable[[Tensor], Tensor]
"""Ids, int64 [n], on the device of the given tensor."""


def _sorted_out(sequences: Sequence[Sequence[int]]) -> tuple[list[Placed], list[tuple[int, Placed]]]:
    """All single ids together, if there are any, and longer sequences with their lengths."""
    singles = [sequence[0] for sequence in sequences if len(sequence) == 1]
    longer = [(len(sequence), _placed(sequence)) for sequence in sequences if len(sequence) > 1]
    return [_placed(singles)] if singles else [], longer


def _placed(ids: Sequence[int]) -> Placed:
    copies: dict[torch.device, Tensor] = {}

    def beside(other: Tensor) -> Tensor:
        if other.device not in copies:
            copies[other.device] = torch.tensor(ids, dtype=torch.int64, device=other.device)
        return copies[other.device]

    return beside
