"""``python -m tokenflow.planner``: a job on stdin, its plans on stdout, one line each as they are found.

For a process that must not wait: planning takes the processor for seconds, so it runs in another process
that gets what nobody else wants of it.  The end of stdin is the end of whoever asked, and of this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

_NICE = 19
_PATIENCE_S = 5
"""So long it does without, on a machine that is busy all the time; then it takes one or two percent."""


def main() -> None:
    """Do the job."""
    # Ctrl-C reaches the whole terminal; whoever asked ends us when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    if hasattr(os, "SCHED_IDLE"):
        _schedule(os.SCHED_IDLE)
        signal.signal(signal.SIGALRM, lambda *_: _schedule(os.SCHED_OTHER))
        signal.alarm(_PATIENCE_S)
    line = sys.stdin.readline()
    threading.Thread(target=_leave, daemon=True).start()
    # Importing scipy takes a moment, after which nobody may be there any more.
    from tokenflow.planner.job import read_job, work, write_planned

    with contextlib.suppress(BrokenPipeError):
        for planned in work(read_job(line)):
            sys.stdout.write(write_planned(planned) + "\n")
            sys.stdout.flush()


def _leave() -> NoReturn:
    """Go as soon as nobody is there any more to read what is planned."""
    sys.stdin.read()
    os._exit(0)


def _schedule(policy: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))


if __name__ == "__main__":
    main()
