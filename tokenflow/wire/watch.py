"""Leaving with another process: with the other side of a socket, or with the one that started this one."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from typing import NoReturn

HANGUP = select.POLLHUP | getattr(select, "POLLRDHUP", 0)

_EXIT_ORPHAN = 3
_PR_SET_PDEATHSIG = 1


def exit_with(fd: int) -> NoReturn:
    """Leave the process as soon as the other end of the socket is gone, whatever other threads are doing."""
    poll = select.poll()
    poll.register(fd, HANGUP)
    poll.poll()
    os._exit(_EXIT_ORPHAN)


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends, even where it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
