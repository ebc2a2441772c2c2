"""Planning while serving: when what is measured has moved, batches are planned again, in another process."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from tokenflow.actors.fork import Owner
from tokenflow.actors.meter import Meter
from tokenflow.dsl.ir import Policy
from tokenflow.errors import PlanError
from tokenflow.settings import worker_environment

if TYPE_CHECKING:
    from tokenflow.planner import Planned, PolicyTable, RoutingModel
    from tokenflow.planner.job import Job, Kind

_COMMAND = (sys.executable, "-P", "-m", "tokenflow.planner")
_TICK_S = 0.5
_SHORT_S, _SHORT_BUSY_S = 3.0, 20.0
"""A load that is over by then was not worth a plan, which slows models down that need all cores."""
_PAUSE_S = 2.0
"""So long what was planned may show its effect, before it is planned again."""
_BUSY_PAUSE = 20
"""Where the models need all cores, planning may take a twentieth of the time."""
_GRID = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MOST = {1: 64, 2: 64, 3: 16}
_MOST_OF_MANY = 8
"""The largest concurrency that is planned, by the number of models: beyond, thresholds are extrapolated."""
_BEYOND = 1.25
_FINER = 0.6
"""What was planned for steps that varied, as the first ones do, is planned again once they are steadier."""
_LONGEST_LINE = 1 << 20
_KINDS: dict[Policy, Kind] = {"planned": "static", "lookahead": "lookahead", "auto": "best"}

log = logging.getLogger("tokenflow.planning")


class Planning:
    """Keeps a table of start policies in step with the load.

    :param policy: of the recipe: ``planned`` plans once, with what is assumed; the others measure.
    :param meter: what is measured.
    :param assumed: says what is planned with until enough was measured; nothing if the recipe does not know.
    :param active: how many requests are active now.
    :param slots: how many there can be.
    :param apply: takes every new table.
    :param spare: whether there are cores that the models do not need.
    """

    def __init__(
        self,
        policy: Policy,
        meter: Meter,
        assumed: Callable[[], RoutingModel | None],
        active: Callable[[], int],
        slots: int,
        apply: Callable[[PolicyTable], None],
        spare: bool = True,
    ) -> None:
        self._kind = _KINDS[policy]
        self._measures = policy != "planned"
        self._meter = meter
        self._assumed = assumed
        self._active = active
        self._most = min(_MOST.get(meter.size, _MOST_OF_MANY), slots)
        self._apply = apply
        self._spare = spare
        self._planned: RoutingModel | None = None
        self._covered = 0
        self._since = 0.0
        self._not_before = 0.0
        self._running = anyio.CancelScope()

    async def run(self) -> None:
        """Plan with what is assumed, then whenever the load has moved; for ever."""
        assumed = await to_thread.run_sync(self._expected, abandon_on_cancel=True)
        self._since = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            if assumed is not None:
                await _load()
                tasks.start_soon(self._plan, assumed, [n for n in _GRID if n <= self._most], 1)
            while self._measures:
                await anyio.sleep(_TICK_S)
                if not self._may_plan():
                    continue
                await _load()
                if (model := self._news()) is not None:
                    tasks.start_soon(self._plan, model, self._order(), 1 if self._spare else _BUSY_PAUSE)

    def _expected(self) -> RoutingModel | None:
        """What is assumed, if it can be planned with."""
        try:
            return self._assumed()
        except PlanError as error:
            log.warning("what the recipe assumes cannot be planned with (%s): batches start as before", error)
            return None

    def _may_plan(self) -> bool:
        """Whether there is anything to plan for, for long enough, and enough to plan with."""
        self._meter.fold()
        now = anyio.current_time()
        if self._active() < 2:
            self._since = now
            return False
        lasts = now - self._since >= (_SHORT_S if self._spare else _SHORT_BUSY_S)
        return lasts and now >= self._not_before and not self._meter.missing

    def _news(self) -> RoutingModel | None:
        """What to plan with now, if anything has changed."""
        model = self._meter.model()
        grown = min(self._active(), self._most) > self._covered * _BEYOND
        if self._planned is None or grown or _moved(self._planned, model, self._active()):
            return model
        return None

    def _order(self) -> list[int]:
        """What is planned: the present concurrency first, then less, so that a falling load finds a plan."""
        first = max(2, min(self._active(), self._most))
        return [first, *(n for n in reversed(_GRID) if n < first)]

    async def _plan(self, model: RoutingModel, order: Sequence[int], pauses: int) -> None:
        """Plan in this order; each plan holds as soon as it is found.  It takes the place of an older one.

        However long planning has taken, ``pauses`` times as long at least is left to what it was done for.
        """
        from tokenflow.planner import Planned, PolicyTable
        from tokenflow.planner.job import Job

        log.debug("planning with %s", model)
        self._running.cancel()
        self._planned, self._covered, self._not_before = model, max(order), math.inf
        began, found = anyio.current_time(), list[Planned]()
        with anyio.CancelScope() as self._running:
            async for planned in _planned(Job(model, tuple(order), self._kind, self._meter.jitter)):
                log.debug("%s", planned)
                found.append(planned)
                self._apply(PolicyTable(model, found))
                if pauses == 1:
                    self._pause(began, pauses)
            self._pause(began, pauses)

    def _pause(self, began: float, pauses: int) -> None:
        now = anyio.current_time()
        self._not_before = min(self._not_before, now + max(_PAUSE_S, pauses * (now - began)))


async def _load() -> None:
    """Import what plans are spoken of in: numpy takes a moment that nobody's tokens should wait for."""
    await to_thread.run_sync(import_module, "tokenflow.planner.job", abandon_on_cancel=True)


async def _planned(job: Job) -> AsyncIterator[Planned]:
    """What another process plans, line by line; it ends with this iteration."""
    from tokenflow.planner.job import read_planned, write_job

    owner = Owner()
    process = await anyio.open_process(
        (*_COMMAND, str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,
        env=worker_environment(1),
        start_new_session=True,  # Ctrl-C in a terminal is for the router to answer
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        await process.stdin.send(write_job(job).encode() + b"\n")
        lines = BufferedByteReceiveStream(process.stdout)
        for _ in job.concurrency:
            line = await lines.receive_until(b"\n", _LONGEST_LINE)
            yield read_planned(line.decode())
    except (anyio.IncompleteRead, anyio.BrokenResourceError):
        log.warning("planning failed: batches start as before")
    finally:
        if owner.here:
            await _end(process)


async def _end(process: Process) -> None:
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.kill()
        await process.aclose()


def _moved(before: RoutingModel, now: RoutingModel, active: int) -> bool:
    """Whether two models differ by more than chance and enough to matter, or steps are known better now."""
    for i in range(now.size):
        for p, q in zip(before.routing[i], now.routing[i], strict=True):
            if abs(p - q) > max(0.01, min(0.03, 0.25 * max(p, q))):
                return True
        for batch in {1, max(1, active // 2), active}:
            if abs(now.step_ms(i, batch) / before.step_ms(i, batch) - 1) > 0.1:
                return True
    return now.quantum_ms < _FINER * before.quantum_ms
