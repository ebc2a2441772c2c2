"""``python -m tokenflow.planner PID``: a job on stdin, its plans on stdout, one line each as they are found.

For a process that must not wait: planning takes the processor for seconds, so it runs in another process
that gets what nobody else wants of it.  It ends when nobody reads its stdout any more,
or process PID, which has started it, is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading

from tokenflow.planner.job import read_job, write_planned
from tokenflow.planner.work import work

_NICE = 19
_LOOK_MS = 500
_PATIENCE_S = 30
"""So long it does without, on a machine that is busy all the time; then it takes one or two percent, for
which others may have to wait some milliseconds."""


def main() -> None:
    """Do the job."""
    threading.Thread(target=_leave, args=(sys.stdout.fileno(), int(sys.argv[1])), daemon=True).start()
    os.nice(_NICE)
    if hasattr(os, "SCHED_IDLE"):
        _schedule(os.SCHED_IDLE)
        signal.signal(signal.SIGALRM, lambda *_: _schedule(os.SCHED_OTHER))
        signal.alarm(_PATIENCE_S)
    if not (line := sys.stdin.readline()):
        return  # whoever was about to ask is gone
    with contextlib.suppress(BrokenPipeError):
        for planned in work(read_job(line)):
            sys.stdout.write(write_planned(planned) + "\n")
            sys.stdout.flush()


def _leave(fd: int, parent: int) -> None:
    """End the process, in the middle of a plan, once nobody reads its stdout, or ``parent`` is gone."""
    poll = select.poll()
    poll.register(fd, 0)  # no more than what is always told: that it is hung up
    while os.getppid() == parent and not poll.poll(_LOOK_MS):
        pass
    os._exit(0)


def _schedule(policy: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))


if __name__ == "__main__":
    main()
