"""Plans as work for another process: plain text in, plain text out, one line per concurrency."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from tokenflow.planner.model import LatencyTable, RoutingModel
from tokenflow.planner.search import best_policy, best_thresholds
from tokenflow.planner.table import Planned

Kind = Literal["static", "lookahead", "best"]
"""Which policies are searched: thresholds alone, lookahead policies, or the faster of the two."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be planned: a model with numbers or tables as latencies, and the concurrencies in order."""

    model: RoutingModel
    concurrency: tuple[int, ...]
    kind: Kind = "best"


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
        }
    )


def read_job(line: str) -> Job:
    """The job of a line that :func:`write_job` wrote."""
    given = json.loads(line)
    concurrency, kind = tuple(given.pop("concurrency")), given.pop("kind")
    given["latency_ms"] = [dict(table) for table in given["latency_ms"]]
    return Job(RoutingModel(**given), concurrency, kind)


def work(job: Job) -> Iterator[Planned]:
    """Plan one concurrency after the other."""
    for concurrency in job.concurrency:
        if job.kind == "static":
            plan = best_thresholds(job.model, concurrency)
            yield Planned(concurrency, plan.thresholds, False, plan.tokens_per_s)
            continue
        policies = best_policy(job.model, concurrency)
        if job.kind == "lookahead" or policies.policy is policies.lookahead:
            found = policies.lookahead_throughput.tokens_per_s
            yield Planned(concurrency, policies.lookahead.thresholds, True, found)
        else:
            yield Planned(concurrency, policies.static.thresholds, False, policies.static.tokens_per_s)


def write_planned(planned: Planned) -> str:
    """What was planned, on one line."""
    return json.dumps(asdict(planned))


def read_planned(line: str) -> Planned:
    """What a line of :func:`write_planned` says."""
    given = json.loads(line)
    return Planned(**{**given, "thresholds": tuple(given["thresholds"])})
