"""What is measured: models, workloads, the requests of each cell, and their prompts.

A *cell* is an algorithm on a set of models, a workload and a concurrency.  All systems are given the same
requests of a cell: prompts of random token ids that no two requests share, and the same traces.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.compare import traces

VOCAB = 8192
ALONE = "llm-only"
"""The algorithm of a cell in which the large model writes everything."""


@dataclass(frozen=True)
class Models:
    """Which models take part, in recipe order: names of shapes in :mod:`bench.shapes`."""

    name: str
    shapes: tuple[str, ...]


SMALL_PAIR = Models("29M+0.1M", ("TINY", "MID"))
LARGE_PAIR = Models("134M+29M", ("MID", "LARGE"))
TRIO = Models("134M+29M+0.1M", ("TINY", "MID", "LARGE"))


@dataclass(frozen=True)
class Workload:
    """``prompt`` tokens in, ``output`` tokens out; ``rounds`` requests for each one in flight.

    Where prompts take so long that responses end before all are read, decoding is measured ``apart``: in
    a second run, with prompts that differ from those of the first in their last token only.
    """

    name: str
    prompt: int
    output: int
    rounds: int
    apart: bool = False


LOW = Workload("low", 100, 256, 2)
HIGH = Workload("high", 100, 1024, 1)
AGENTIC = Workload("agentic", 2048, 128, 1, apart=True)
WORKLOADS = (LOW, HIGH, AGENTIC)


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    algorithm: str
    models: Models
    workload: Workload
    concurrency: int

    @property
    def name(self) -> str:
        """Unique among all cells."""
        return f"{self.algorithm} {self.models.name} {self.workload.name} x{self.concurrency}"

    @property
    def count(self) -> int:
        """How many requests it has."""
        return self.concurrency * self.workload.rounds


@dataclass(frozen=True)
class Request:
    """One request: ``prompt_tokens`` in, and the trace of its response."""

    prompt_tokens: int
    trace: str


def full_table() -> list[Cell]:
    """Every algorithm and workload at concurrency 4, two of them at 1 and 16, larger models on low effort."""
    cells = [Cell(ALONE, SMALL_PAIR, workload, 4) for workload in WORKLOADS]
    for algorithm in traces.ALGORITHMS:
        models = TRIO if algorithm == "me" else SMALL_PAIR
        cells += [Cell(algorithm, models, workload, 4) for workload in WORKLOADS]
    for concurrency in (1, 16):
        cells += [Cell(algorithm, SMALL_PAIR, LOW, concurrency) for algorithm in (ALONE, "r2r", "r-stitch")]
    return cells + [Cell(algorithm, LARGE_PAIR, LOW, 4) for algorithm in (ALONE, *traces.ALGORITHMS[:4])]


def quick_table() -> list[Cell]:
    """Two algorithms on low effort."""
    return [Cell(algorithm, SMALL_PAIR, LOW, 4) for algorithm in (ALONE, "r2r", "r-stitch")]


def requests(cell: Cell) -> list[Request]:
    """The requests of a cell, the same for every system and repetition."""
    if cell.algorithm == ALONE:
        return [Request(cell.workload.prompt, "A" * cell.workload.output)] * cell.count
    recorded = traces.load()[cell.algorithm]
    return [
        Request(cell.workload.prompt, traces.scale(recorded, cell.workload.output, index))
        for index in range(cell.count)
    ]


def save(listed: Sequence[Request], path: Path) -> None:
    """Write requests for the systems to read."""
    path.write_text(json.dumps([asdict(request) for request in listed]), encoding="ascii")


def load(path: Path) -> list[Request]:
    """Requests as :func:`save` wrote them; a request is known by its index."""
    return [Request(**item) for item in json.loads(path.read_text(encoding="ascii"))]


def prompt(index: int, tokens: int, salt: str = "", twist: int = 0) -> list[int]:
    """Token ids of request ``index``.

    :param salt: another one gives others, so that no prefix cache knows them.
    :param twist: another one gives others from the last token on.
    """
    numbers = random.Random(f"{salt}/{index}")
    ids = [numbers.randrange(2, VOCAB) for _ in range(tokens)]
    ids[-1] = (ids[-1] - 2 + 4099 * twist) % (VOCAB - 2) + 2
    return ids
