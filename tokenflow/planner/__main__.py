"""``python -m tokenflow.planner``: a job on stdin, its plans on stdout, one line each as they are found.

For a process that must not wait: planning takes the processor for seconds, so it runs in another process
that gets what nobody else wants of it.
"""

from __future__ import annotations

import contextlib
import os
import sys

from tokenflow.planner.job import read_job, work, write_planned


def main() -> None:
    """Do the job."""
    _step_back()
    for planned in work(read_job(sys.stdin.readline())):
        sys.stdout.write(write_planned(planned) + "\n")
        sys.stdout.flush()


def _step_back() -> None:
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    main()
