"""What tokenflow would reach if nothing but forward passes, or nothing but steps, took time.

The steps of a run give the time of a forward pass, and that of a whole step with sampling and routing, by its
tokens and context, per model.  A simulation then sends the same requests over the same traces through models
that take that long and nothing else, each starting as soon as somebody waits for it.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.compare import traces
from bench.compare.work import Request

BUDGET = 2048
"""Most tokens of one step; longer prefills are cut (``max_batch_tokens``)."""
_LONG = 64
"""Tokens from which a step counts as a prefill, which has a fit of its own."""


class Step(NamedTuple):
    """A step that was run: ``context`` is the sum of its ``rows``' lengths after it.

    ``step_s`` is from the frame's arrival in the worker to its reply, ``forward_s`` the engine's part of it.
    """

    model: int
    computed: int
    context: int
    forward_s: float
    step_s: float
    rows: int = 1


class StepTimes:
    """Seconds of a step: linear in its tokens and its context, per model; short and long ones apart.

    :param whole: the whole step's, otherwise its forward pass's.
    """

    def __init__(self, steps: Sequence[Step], whole: bool) -> None:
        kinds: dict[tuple[int, bool], list[Step]] = defaultdict(list)
        for step in steps:
            kinds[step.model, step.computed > _LONG].append(step)
        self._fits = {kind: _fit(listed, whole) for kind, listed in kinds.items()}

    def __call__(self, model: int, computed: int, context: int) -> float:
        fit = self._fits.get((model, computed > _LONG), self._fits.get((model, False)))
        assert fit is not None
        return max(0.0, float(fit @ (1, computed, context)))


def _fit(steps: Sequence[Step], whole: bool) -> NDArray[np.float64]:
    features = np.array([(1, step.computed, step.context) for step in steps], dtype=float)
    seconds = np.array([step.step_s if whole else step.forward_s for step in steps])
    fit, *_ = np.linalg.lstsq(features, seconds, rcond=None)
    return fit


class _Active:
    """A request on its way: where it is in its trace, and how much each model has read of it."""

    def __init__(self, request: Request) -> None:
        self.trace = request.trace
        self.event = 0
        self.length = request.prompt_tokens
        self.read: dict[int, int] = defaultdict(int)

    @property
    def model(self) -> int:
        return traces.model_of(self.trace[self.event])


def simulate(
    requests: Sequence[Request], concurrency: int, times: StepTimes, limit_s: float = math.inf
) -> tuple[float, int]:
    """The seconds that the requests take, ``concurrency`` at a time, and their tokens.

    What would take longer than ``limit_s`` is cut then.
    """
    todo = [_Active(request) for request in reversed(requests)]
    waiting: dict[int, list[_Active]] = defaultdict(list)
    running: list[tuple[float, int]] = []
    batches: dict[int, list[tuple[_Active, int]]] = {}
    now, tokens = 0.0, 0
    for _ in range(min(concurrency, len(todo))):
        active = todo.pop()
        waiting[active.model].append(active)
    while True:
        for model, queue in waiting.items():
            if queue and model not in batches:
                shares = _shares([active.length - active.read[model] for active in queue])
                batch = list(zip(queue, shares, strict=True))
                computed = sum(shares)
                context = sum(active.read[model] + share for active, share in batch if share)
                batches[model] = batch
                heapq.heappush(running, (now + times(model, computed, context), model))
                waiting[model] = []
        if not running:
            return now, tokens
        now, model = heapq.heappop(running)
        if now > limit_s:
            return limit_s, tokens
        for active, share in batches.pop(model):
            active.read[model] += share
            if active.read[model] < active.length:
                waiting[model].append(active)
                continue
            kept = active.trace[active.event].isupper()
            active.length += kept
            tokens += kept
            active.event += 1
            if active.event < len(active.trace):
                waiting[active.model].append(active)
            elif todo:
                new = todo.pop()
                waiting[new.model].append(new)


def _shares(pending: Sequence[int]) -> list[int]:
    """How many tokens each request feeds: single ones always, longer ones in order while there is room."""
    left = max(BUDGET - sum(count == 1 for count in pending), 1)
    shares = []
    for count in pending:
        share = 1 if count == 1 else min(count, left)
        left -= share if count > 1 else 0
        shares.append(share)
    return shares
