"""Recorded routes: which model writes each token of a response, and which tokens are dropped.

A trace is a string with a letter for every token that a model sampled, in order: ``a`` for the recipe's
first model, ``b`` for its second, and so on; upper case if the token was kept, lower case if it was dropped
and another model wrote its position.  ``AAaBA`` is a response of four tokens: the first model wrote two, its
third was dropped, the second model wrote that position and handed back.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "traces.json.gz"
ALGORITHMS = ("r-stitch", "r2r", "citer", "co-llm", "me")


class Run(NamedTuple):
    """Consecutive tokens of one model: ``kept`` tokens, and one more that is dropped if ``drops``."""

    model: int
    kept: int
    drops: bool


def load(path: Path = FILE) -> dict[str, list[str]]:
    """Recorded traces by algorithm."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        recorded: dict[str, list[str]] = json.load(file)
    return recorded


def save(traces: dict[str, list[str]], path: Path = FILE) -> None:
    """Write traces by algorithm; equal traces give equal bytes."""
    text = json.dumps(traces, indent=0).encode("ascii")
    path.write_bytes(gzip.compress(text, mtime=0))


def kept(trace: str) -> int:
    """How many tokens the response has."""
    return sum(letter.isupper() for letter in trace)


def writers(trace: str) -> list[int]:
    """The model of each token of the response, from 0."""
    return [model_of(letter) for letter in trace if letter.isupper()]


def model_of(letter: str) -> int:
    """Index of a letter's model, from 0."""
    return ord(letter.lower()) - ord("a")


def runs(trace: str) -> Iterator[Run]:
    """The visits of a response: what each model does until another goes on."""
    start = 0
    for end in range(1, len(trace) + 1):
        if end == len(trace) or trace[end].lower() != trace[start].lower():
            part = trace[start:end]
            yield Run(model_of(part[0]), kept(part), part[-1].islower())
            start = end


def calls(trace: str, variant: str) -> list[Run]:
    """The requests that a response becomes where a model is called for each ``visit``, or each ``token``."""
    if variant == "visit":
        return list(runs(trace))
    return [Run(model_of(letter), int(letter.isupper()), letter.islower()) for letter in trace]


def scale(recorded: Sequence[str], tokens: int, seed: int) -> str:
    """A trace of ``tokens`` kept tokens: recorded ones in random order, one after the other, cut to length.

    Each begins at the first model; what an ensemble's trace has before that is left out.  So visits keep the
    lengths and the order that they had in some response, however long the new one is.
    """
    numbers = random.Random(f"{seed}/{tokens}")
    parts, count = [], 0
    while count < tokens:
        part = numbers.choice(recorded)
        part = part[part.find("A") :] if "A" in part else ""
        parts.append(part)
        count += kept(part)
    whole = "".join(parts)
    for _ in range(count - tokens):
        whole = whole[: _last_kept(whole)]
    return whole[: _last_kept(whole) + 1]


def _last_kept(trace: str) -> int:
    return max(index for index, letter in enumerate(trace) if letter.isupper())
