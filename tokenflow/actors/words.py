"""What a process says at its end: its exit code, and the last lines of its standard error."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import deque

_LINES = 40
"""Enough for the stacks of some threads, with the line above them that says what happened."""
_LONGEST_LINE = 4096
_READ = 1 << 16
_LOGGED_LINES, _SPAN_S = 1000, 1.0
"""So many lines are logged in such a time; tokens do not wait for a worker that floods its log."""

log = logging.getLogger("tokenflow.worker")


class LastWords:
    """What a process writes to its standard error, logged under ``name``; ``lines`` are the last ones.

    Of a flood only the beginning is logged, and how much there was.  ``closed`` is set when nobody can write
    any more.
    """

    def __init__(self, name: str) -> None:
        self.lines: deque[str] = deque(maxlen=_LINES)
        self.closed = asyncio.Event()
        self._name = name
        self._line = b""
        self._since = 0.0
        self._logged = self._withheld = 0
        self._reading = -1

    def open(self) -> int:
        """Start listening; returns the descriptor to write to, which is the caller's to close."""
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)
        return writing

    def close(self) -> None:
        """Stop listening, though somebody may still write."""
        if self._reading < 0:
            return
        # uvloop's transports for pipes close a number twice, and it may be another thread's by then.
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        self._reading = -1
        if self._line:
            self._report([self._line])
        self._admit_to_have_withheld()
        self.closed.set()

    def ending(self, code: int | None, after: str = "") -> str:
        """How the process ended: its exit code (minus a signal's number; None if nobody saw it), ``after``
        what, and its last lines."""
        if code is None:
            cause = "an exit code that nobody saw"
        else:
            cause = f"exit code {code}" if code >= 0 else f"signal {-code} ({_signal_name(-code)})"
        reason = f" after {after}" if after else ""
        lines = "".join(f"\n  {line}" for line in self.lines)
        return cause + reason + (f"; its last words:{lines}" if lines else "")

    def _read(self) -> None:
        try:
            data = os.read(self._reading, _READ)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[-_LONGEST_LINE:]
        self._report(lines)

    def _report(self, lines: list[bytes]) -> None:
        now = time.monotonic()
        if now >= self._since + _SPAN_S:
            self._admit_to_have_withheld()
            self._since, self._logged = now, 0
        logged = lines[: _LOGGED_LINES - self._logged]
        self._logged += len(logged)
        self._withheld += len(lines) - len(logged)
        for line in logged:
            log.warning("[%s] %s", self._name, _text(line))
        self.lines.extend(map(_text, lines[-_LINES:]))

    def _admit_to_have_withheld(self) -> None:
        if self._withheld:
            log.warning("[%s] ... and %d more lines", self._name, self._withheld)
            self._withheld = 0


def _text(line: bytes) -> str:
    return line[-_LONGEST_LINE:].decode(errors="replace").rstrip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
