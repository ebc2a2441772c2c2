"""Does the jobs that come to another process."""

from __future__ import annotations

from collections.abc import Iterator

from tokenflow.planner.job import Job
from tokenflow.planner.search import best_policy, best_thresholds
from tokenflow.planner.table import Planned

_STATES, _EFFORT = 20_000, 0.2
"""What is measured while serving is known to a few percent: more would be wasted on it."""

_WORTH = 0.01
"""What gains less is not worth more than eager starts, nor looking ahead worth more than thresholds."""
_ROUGH = 0.08
"""Where steps vary by more than this share, there is no looking ahead to their ends."""


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
