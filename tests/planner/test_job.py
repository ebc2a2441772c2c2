"""Planning in another process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.planner.models import r2r
from tokenflow.planner import RoutingModel, best_policy, best_thresholds
from tokenflow.planner.job import Job, Kind, read_job, read_planned, work, write_job, write_planned

MODEL = RoutingModel(
    [[0.5, 0.25, 0.25], [0.5, 0.5, 0], [1, 0, 0]],
    [[1, 0, 0], [1, 1, 1], [0.5, 2, 1]],
    [6.0, {1: 10, 8: 12.5}, 30],
    quantum_ms=0.2,
    batch_limits=[None, 8, 16],
    entry=1,
)


def test_a_job_is_read_as_it_was_written() -> None:
    job = Job(MODEL, (8, 4, 2), "lookahead")
    again = read_job(write_job(job))
    assert again == job
    assert again.model.step_ms(1, 4) == MODEL.step_ms(1, 4)


@pytest.mark.parametrize("kind", ["static", "lookahead", "best"])
def test_the_work_is_what_the_planner_finds(kind: Kind) -> None:
    model = r2r(large_ms=12.1)
    for planned in work(Job(model, (2, 6), kind)):
        plan, policies = best_thresholds(model, planned.concurrency), best_policy(model, planned.concurrency)
        if kind == "static":
            assert (planned.thresholds, planned.lookahead) == (plan.thresholds, False)
            assert planned.tokens_per_s == plan.tokens_per_s
        elif kind == "lookahead":
            assert (planned.thresholds, planned.lookahead) == (policies.lookahead.thresholds, True)
        else:
            assert planned.tokens_per_s == policies.throughput.tokens_per_s
            assert planned.lookahead == (policies.policy is policies.lookahead)


def test_another_process_plans_line_by_line() -> None:
    job = Job(r2r(), (4, 2))
    done = subprocess.run(
        [sys.executable, "-m", "tokenflow.planner"],
        input=write_job(job) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [read_planned(line) for line in lines] == list(work(job))
    assert [write_planned(read_planned(line)) for line in lines] == lines


def test_a_planner_that_nobody_reads_ends_in_the_middle_of_its_plan() -> None:
    job = write_job(Job(r2r(), (64,) * 1000))
    command = [sys.executable, "-m", "tokenflow.planner"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as planner:
        assert planner.stdin is not None and planner.stdout is not None
        planner.stdin.write(job + "\n")
        planner.stdin.flush()
        planner.stdout.readline()
        planner.stdout.close()
        assert planner.wait(3) == 0
