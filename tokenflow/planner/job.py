"""Plans as work for another process: plain text in, plain text out, one line per concurrency.

Whoever asks for plans imports this, but not what makes them (``work.py``), which takes half a second to load.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from tokenflow.planner.model import LatencyTable, RoutingModel
from tokenflow.planner.table import Planned

Kind = Literal["static", "lookahead", "best"]
"""Which policies are searched: thresholds alone, lookahead policies, or whatever is worthwhile."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be planned: a model with numbers or tables as latencies, and the concurrencies in order.

    :param jitter: how much steps vary, relative to their latency.
    """

    model: RoutingModel
    concurrency: tuple[int, ...]
    kind: Kind = "best"
    jitter: float = 0.0


def write_job(job: Job) -> str:
    """The job on one line."""
    model = job.model
    tables = [latency for latency in model.latency_ms if isinstance(latency, LatencyTable)]
    assert len(tables) == model.size, "only tables can be written down"
    return json.dumps(
        {
            "routing": model.routing,
            "commits": model.commits,
            "latency_ms": [list(zip(table.sizes, table.values_ms, strict=True)) for table in tables],
            "quantum_ms": model.quantum_ms,
            "batch_limits": model.batch_limits,
            "entry": model.entry,
            "concurrency": job.concurrency,
            "kind": job.kind,
            "jitter": job.jitter,
        }
    )


def read_job(line: str) -> Job:
    """The job of a line that :func:`write_job` wrote."""
    given = json.loads(line)
    concurrency, kind, jitter = tuple(given.pop("concurrency")), given.pop("kind"), given.pop("jitter")
    given["latency_ms"] = [dict(table) for table in given["latency_ms"]]
    return Job(RoutingModel(**given), concurrency, kind, jitter)


def write_planned(planned: Planned) -> str:
    """What was planned, on one line."""
    return json.dumps(asdict(planned))


def read_planned(line: str) -> Planned:
    """What a line of :func:`write_planned` says."""
    given = json.loads(line)
    return Planned(**{**given, "thresholds": tuple(given["thresholds"])})
