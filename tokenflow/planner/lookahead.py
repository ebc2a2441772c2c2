"""The lookahead policy: hold a batch back for requests that are about to arrive.

The scheduler knows every model's queue, the expected end of every running batch and the routing
probabilities, so it can weigh starting now against starting a little later.  ``docs/planner.md`` derives
the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow.planner.model import RoutingModel, check_concurrency, check_thresholds
from tokenflow.planner.policy import Decision, Snapshot

_NEGLIGIBLE = 1e-3

# An overdue batch is expected to take as long again as it is late, and at first this share of its latency:
# so it is asked about again a few times, and a model that hangs is soon not waited for any more.
_LATE = 0.01


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Start a model when its threshold is reached, unless a short wait saves more waiting than it costs.

    A model is held only while another one runs, and never beyond the end of that batch; so with thresholds
    that are feasible without it, something always runs.

    :param thresholds: fewest requests of a batch, per model.
    :param routing: P, shape [M, M].
    :param step_ms: step latency by model and batch size, shape [M, N + 1]; the entry of size 0 is 0.
    :param limits: most requests of a batch, per model.
    """

    thresholds: tuple[int, ...]
    routing: tuple[tuple[float, ...], ...]
    step_ms: tuple[tuple[float, ...], ...]
    limits: tuple[int, ...]

    @classmethod
    def of(cls, model: RoutingModel, concurrency: int, thresholds: Sequence[int] | None = None) -> Lookahead:
        """The policy for ``concurrency`` requests; without ``thresholds``, only the rule holds a model back.

        :raises PlanError: for a concurrency or thresholds that do not fit the model.
        """
        concurrency = check_concurrency(concurrency)
        values = check_thresholds(model, (1,) * model.size if thresholds is None else thresholds, concurrency)
        limits = tuple(model.batch_limit(i, concurrency) for i in range(model.size))
        return cls(
            thresholds=values,
            routing=tuple(tuple(row) for row in model.routing),
            step_ms=tuple(
                (0.0, *(model.step_ms(i, batch) for batch in range(1, limit + 1)))
                for i, limit in enumerate(limits)
            ),
            limits=limits,
        )

    def decide(self, snapshot: Snapshot) -> Decision:
        """Decide for the fastest model first; what it starts counts as running for the slower ones."""
        queued, running = list(snapshot.queued), list(snapshot.running)
        residual = [
            left if left > 0 else max(-left, _LATE * self.expected_ms(i, b))
            for i, (b, left) in enumerate(zip(running, snapshot.residual_ms, strict=True))
        ]
        start: list[int] = []
        ask_again = math.inf
        for i in sorted(range(len(queued)), key=lambda i: self.step_ms[i][1]):
            if running[i] or queued[i] < self.thresholds[i]:
                continue
            hold = self.hold_ms(i, queued[i], running, residual)
            if hold > 0:
                ask_again = min(ask_again, hold)
                continue
            batch = min(queued[i], self.limits[i])
            queued[i] -= batch
            running[i], residual[i] = batch, self.step_ms[i][batch]
            start.append(i)
        return Decision(tuple(start), ask_again)

    def hold_ms(
        self, model: int, waiting: int, running: Sequence[int], residual_ms: Sequence[float]
    ) -> float:
        """How long ``model`` had better wait with ``waiting`` requests queued; 0 to start now.

        Compares the total waiting of the requests concerned if the batch starts now and if it starts when a
        running batch of another model ends, and takes the earliest such end that saves waiting.
        """
        step, limit = self.step_ms[model], self.limits[model]
        if waiting >= limit:
            return 0.0
        duration = step[waiting]
        others = [
            (residual_ms[j], self.expected_ms(j, b), b * self.routing[j][model], self.routing[j][j])
            for j, b in enumerate(running)
            if b and j != model and residual_ms[j] < duration and self.routing[j][model] > 0
        ]
        for end in sorted({other[0] for other in others}):
            arrivals = saved = 0.0
            for first, period, count, stay in others:
                if first <= end:
                    arrivals += count
                    saved += count * _saved_wait(first, period, stay, end, duration)
            more = max(1, min(round(arrivals), limit - waiting))
            together = step[waiting + more]
            cost = waiting * (end + together - duration) + arrivals * (together - step[more])
            if cost < saved:
                return end
        return 0.0

    def free_steps(
        self, model: int, batch: int, running: Sequence[int], residual_ms: Sequence[float]
    ) -> float:
        """How many batches ``model`` starts without a wait after one of ``batch`` requests that starts now.

        A batch waits for ends within its own latency only, and nobody joins it before the next end; so all
        start at once that are over before then.
        """
        ends = (
            left for j, left in enumerate(residual_ms) if running[j] and self.routing[j][model] and j != model
        )
        steps = min(ends, default=math.inf) / max(self.step_ms[model][1 : batch + 1])
        return max(math.floor(steps) - 1, 0) if steps < math.inf else steps

    def expected_ms(self, model: int, batch: int) -> float:
        """Latency of a running batch, which may be larger than any new one when requests were withdrawn."""
        return self.step_ms[model][min(batch, self.limits[model])]


def _saved_wait(first: float, period: float, stay: float, end: float, duration: float) -> float:
    """Waiting that one arrival stream is spared when a batch starts at ``end`` instead of now, per request.

    The stream brings requests at ``first``, ``first + period``, ...; each time a share ``stay`` of those that
    came the time before, since only requests that stayed at the other model can come from its next step.
    A request that finds the batch running waits for its end, one that comes before it starts waits for that.
    """
    saved, share, at = 0.0, 1.0, first
    while at <= end + duration and share > _NEGLIGIBLE:
        later = end - at if at <= end else end + duration - at
        saved += share * (max(duration - at, 0.0) - later)
        share *= stay
        at += period
    return saved
