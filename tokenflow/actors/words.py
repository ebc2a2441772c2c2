"""What a process says at its end: its exit code, and the last lines of its standard error."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque

_LINES = 20
_LONGEST_LINE = 4096

log = logging.getLogger("tokenflow.worker")


class LastWords(asyncio.Protocol):
    """What a process writes to its standard error, logged under ``name``; ``lines`` are the last ones.

    ``closed`` is set when nobody can write any more.
    """

    def __init__(self, name: str) -> None:
        self.lines: deque[str] = deque(maxlen=_LINES)
        self.closed = asyncio.Event()
        self._name = name
        self._line = b""
        self._transport: asyncio.BaseTransport | None = None

    async def open(self) -> int:
        """Start listening; returns the descriptor to write to, which is the caller's to close."""
        reading, writing = os.pipe()
        try:
            pipe = os.fdopen(reading, "rb", buffering=0)
            self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        except BaseException:
            os.close(writing)
            pipe.close()
            raise
        return writing

    def close(self) -> None:
        """Stop listening, though somebody may still write."""
        if self._transport is not None:
            self._transport.close()

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

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[-_LONGEST_LINE:]
        for line in lines:
            self._report(line)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._line:
            self._report(self._line)
        self.closed.set()

    def _report(self, line: bytes) -> None:
        text = line[-_LONGEST_LINE:].decode(errors="replace").rstrip()
        self.lines.append(text)
        log.warning("[%s] %s", self._name, text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
