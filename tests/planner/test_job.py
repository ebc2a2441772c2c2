"""Planning in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.planner.models import ensemble, r2r
from tokenflow.planner import RoutingModel, best_policy, best_thresholds
from tokenflow.planner.job import Job, Kind, read_job, read_planned, write_job, write_planned
from tokenflow.planner.work import work

MODEL = RoutingModel(
    [[0.5, 0.25, 0.25], [0.5, 0.5, 0], [1, 0, 0]],
    [[1, 0, 0], [1, 1, 1], [0.5, 2, 1]],
    [6.0, {1: 10, 8: 12.5}, 30],
    quantum_ms=0.2,
    batch_limits=[None, 8, 16],
    entry=1,
)


def test_who_asks_for_plans_does_not_wait_for_the_libraries_that_make_them() -> None:
    """It is an event loop, and their import takes half a second."""
    program = (
        "import sys; import tokenflow.actors.planning, tokenflow.planner.job, tokenflow.planner.table; "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "tokenflow.planner.job" in loaded
    assert not loaded & {"scipy", "tokenflow.planner.search"}


def test_a_job_is_read_as_it_was_written() -> None:
    job = Job(MODEL, (8, 4, 2), "lookahead", jitter=0.05)
    again = read_job(write_job(job))
    assert again == job
    assert again.model.step_ms(1, 4) == MODEL.step_ms(1, 4)


@pytest.mark.parametrize("kind", ["static", "lookahead"])
def test_the_work_is_what_the_planner_finds(kind: Kind) -> None:
    model = r2r(large_ms=12.1)
    for planned in work(Job(model, (2, 6), kind)):
        plan, policies = best_thresholds(model, planned.concurrency), best_policy(model, planned.concurrency)
        if kind == "static":
            assert (planned.thresholds, planned.lookahead) == (plan.thresholds, False)
            assert planned.tokens_per_s == plan.tokens_per_s
        else:
            assert (planned.thresholds, planned.lookahead) == (policies.lookahead.thresholds, True)


@pytest.mark.parametrize(
    ("model", "jitter", "expected"),
    [
        (r2r(large_ms=12.1), 0.0, (True, (1, 2))),  # just above an integer ratio
        (r2r(large_ms=12.1), 0.2, (False, (3, 1))),  # there is no telling when steps end
        (r2r(large_ms=60.0), 0.0, (False, (1, 7))),  # looking ahead gains nothing
        (r2r(0.05, large_ms=9.0), 0.2, (False, (1, 1))),  # nothing to gain
    ],
)
def test_the_simplest_policy_is_taken_that_is_not_clearly_slower(
    model: RoutingModel, jitter: float, expected: tuple[bool, tuple[int, ...]]
) -> None:
    [planned] = work(Job(model, (8,), "best", jitter))
    assert (planned.lookahead, planned.thresholds) == expected


@contextmanager
def planner(job: Job) -> Iterator[subprocess.Popen[str]]:
    """Another process that has been given a job; who asked is there until this ends."""
    command = [sys.executable, "-m", "tokenflow.planner", str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(write_job(job) + "\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def test_another_process_plans_line_by_line() -> None:
    job = Job(r2r(), (4, 2))
    with planner(job) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = process.stdout.read().splitlines()
        assert (process.wait(), process.stderr.read()) == (0, "")
    assert [read_planned(line) for line in lines] == list(work(job))
    assert [write_planned(read_planned(line)) for line in lines] == lines


@pytest.mark.parametrize("when", ["before anything is planned", "in the middle of a plan"])
def test_a_planner_that_nobody_reads_ends_and_says_nothing(when: str) -> None:
    with planner(Job(ensemble(6.0, 12.0, 27.9), (2, 40, 40))) as process:
        assert process.stdout is not None and process.stderr is not None
        if when == "in the middle of a plan":
            assert read_planned(process.stdout.readline()).concurrency == 2
        process.stdout.close()
        assert (process.wait(timeout=10), process.stderr.read()) == (0, "")
