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
_LOOK_MS = 500


class Parent:
    """The process that started this one.

    What was forked from it holds its end of a socket as well, so a socket may stay open when it is gone.

    :param pid: its process id, as it knows it itself.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # it is gone already, or the system does not know how
            self._pidfd = -1

    @property
    def gone(self) -> bool:
        """Whether it has ended: this process has got another parent then, also where the id is used again."""
        return os.getppid() != self._pid

    def attend(self, poll: select.poll) -> int | None:
        """Have ``poll`` wake up at its end; returns after how many ms to look whether it is gone."""
        if self._pidfd < 0:
            return _LOOK_MS
        poll.register(self._pidfd, select.POLLIN)
        return None

    def close(self) -> None:
        """Give the descriptor back."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def exit_with(fd: int, parent: Parent | None = None) -> NoReturn:
    """Leave the process as soon as the other end of the socket is gone, or the parent, whatever other threads
    are doing."""
    poll = select.poll()
    poll.register(fd, HANGUP)
    patience = parent.attend(poll) if parent else None
    while not (parent and parent.gone) and not poll.poll(patience):
        pass
    os._exit(_EXIT_ORPHAN)


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends, even where it is stopped."""
    _when_parent_ends(signal.SIGKILL)


def go_on_with_parent() -> None:
    """Have Linux continue this process, if it is stopped, when the thread that started it ends.

    A process that is stopped sees nothing, and would be left behind; one that runs does not notice, so it
    does no harm that other threads of the parent may go on.
    """
    _when_parent_ends(signal.SIGCONT)


def _when_parent_ends(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
