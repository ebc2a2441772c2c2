"""Plans as work for another process: plain text in, plain text out, one line per concurrency."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from tokenflow.planner.model import LatencyTable, RoutingModel
from tokenflow.planner.search import best_policy, best_thresholds
from tokenflow.planner.table import Planned

_STATES, _EFFORT = 20_000, 0.2
"""What is measured while serving is known to a few percent: more would be wasted on it."""

_WORTH = 0.01
"""What gains less is not worth more than eager starts, nor looking ahead worth more than thresholds."""
_ROUGH = 0.08
"""Where steps vary by more than this share, there is no looking ahead to their ends."""

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


def work(job: Job) -> Iterator[Planned]:
    """Plan one concurrency after the other."""
    for concurrency in job.concurrency:
        yield {"static": _static, "lookahead": _lookahead, "best": _best}[job.kind](job, concurrency)


def _static(job: Job, concurrency: int) -> Planned:
    plan = best_thresholds(job.model, concurrency, state_limit=_STATES, effort=_EFFORT)
    return Planned(concurrency, plan.thresholds, False, plan.tokens_per_s)


def _lookahead(job: Job, concurrency: int) -> Planned:
    plan = best_policy(job.model, concurrency, state_limit=_STATES, effort=_EFFORT)
    return Planned(concurrency, plan.lookahead.thresholds, True, plan.lookahead_throughput.tokens_per_s)


def _best(job: Job, concurrency: int) -> Planned:
    """The simplest policy that is not clearly slower than another one."""
    if job.jitter > _ROUGH:
        static, lookahead = best_thresholds(job.model, concurrency, state_limit=_STATES, effort=_EFFORT), None
    else:
        plan = best_policy(job.model, concurrency, state_limit=_STATES, effort=_EFFORT)
        static, lookahead = plan.static, plan
    best = Planned(concurrency, (1,) * job.model.size, False, static.eager.tokens_per_s)
    if static.throughput.at_least > best.tokens_per_s * (1 + _WORTH):
        best = Planned(concurrency, static.thresholds, False, static.tokens_per_s)
    if lookahead and lookahead.lookahead_throughput.at_least > best.tokens_per_s * (1 + _WORTH):
        rate = lookahead.lookahead_throughput.tokens_per_s
        best = Planned(concurrency, lookahead.lookahead.thresholds, True, rate)
    return best


def write_planned(planned: Planned) -> str:
    """What was planned, on one line."""
    return json.dumps(asdict(planned))


def read_planned(line: str) -> Planned:
    """What a line of :func:`write_planned` says."""
    given = json.loads(line)
    return Planned(**{**given, "thresholds": tuple(given["thresholds"])})
