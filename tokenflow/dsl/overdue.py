"""A recipe's own functions that do not return: they run in the router, where everybody waits for them.

A thread looks on from outside.  When a function has held up its thread for a while, the log says which one.
From then on a signal that is to end the process ends the function first, so that it is heard; and when the
function's time is up, it is ended anyway.  To be ended is to have an exception raised inside, which also
interrupts waiting for a socket or a clock; a function that catches even that and goes on has it raised twice,
the second time where it has caught the first.  Like all signals it takes the main thread, and a function that
runs Python or waits.  In another thread, or where the program uses SIGURG itself, there is the log alone.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from time import monotonic, sleep
from types import FrameType
from typing import Any, NoReturn

log = logging.getLogger(__name__)

HELD_UP_S = 1.0
"""How long a function may take without being spoken of."""
LONGEST_S = 10.0
"""How long it may take at all."""
_TICK_S = 0.25
_HEARD_S = 1.0
"""So long after a signal no function is called: its batch may hold more that keep it from being heard."""
_NUDGE = signal.SIGURG
"""Nobody else uses it, and whoever does not know it ignores it."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TookTooLong(BaseException):
    """Raised inside a function that is to be ended; whoever catches every Exception lets it pass."""


class _Call:
    """A function that runs: what the log calls it, and for how many seconds it may."""

    __slots__ = ("began", "ended", "handlers", "longest_s", "name", "told", "tracer")

    def __init__(self, name: str, longest_s: float) -> None:
        self.name = name
        self.longest_s = longest_s
        self.began = monotonic()
        self.handlers: dict[signal.Signals, Any] | None = None
        """Of signals that end the process, once it has taken long."""
        self.told = False
        self.tracer: Any = None
        """What the thread was traced with before the function was ended: by a debugger, say."""
        self.ended = ""
        """Why it was ended, if it was; then it should be over soon."""


_calls: dict[int, _Call] = {}
"""What runs at the moment, by thread."""
_looker_on: list[threading.Thread] = []
_ended_at: list[float] = []
"""When signals that are to end the process have ended a function."""


def prepare() -> None:
    """Make it possible to end functions of this thread, if it is the main one and the signal is free."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(_NUDGE) is signal.SIG_DFL:
        signal.signal(_NUDGE, _nudged)


def call(name: str, longest_s: float, function: Callable[..., object], *arguments: object) -> object:
    """Call a function that may not return.

    :param name: what the log calls it.
    :param longest_s: seconds after which it is ended.
    :raises TookTooLong: if it had to be ended.
    """
    thread = threading.get_ident()
    running = _Call(name, longest_s)
    if _ended_at and running.began - _ended_at[-1] < _HEARD_S:
        raise TookTooLong("it was not called, because the process is to end")
    _calls[thread] = running
    if not _looker_on:
        _look_on()
    try:
        return function(*arguments)
    finally:
        _calls.pop(thread, None)
        if running.ended:
            sys.settrace(running.tracer)
        if running.handlers:
            _restore(running.handlers)


def _look_on() -> None:
    def look() -> None:
        while True:
            sleep(_TICK_S)
            for thread, running in list(_calls.items()):
                _look_at(thread, running)

    _looker_on.append(threading.Thread(target=look, name="overdue", daemon=True))
    _looker_on[0].start()


def _look_at(thread: int, running: _Call) -> None:
    """Have the thread of a call that takes long see to it, and speak of it once that had time to happen."""
    seconds = monotonic() - running.began
    if seconds < min(HELD_UP_S, running.longest_s):
        return
    can_end = thread == threading.main_thread().ident and signal.getsignal(_NUDGE) is _nudged
    if running.handlers is None:
        running.handlers = {}
    elif not running.told:
        running.told = True
        then = f"it is ended after {running.longest_s:g} s" if can_end else "nothing can end it"
        log.warning(
            "%s holds up the event loop and all requests, for %.1f s now; %s", running.name, seconds, then
        )
    if can_end:
        signal.pthread_kill(thread, _NUDGE)


def _nudged(number: int, frame: FrameType | None) -> None:
    """In the thread of a call that takes long: let signals that end the process through to it, or end it."""
    thread = threading.get_ident()
    running = _calls.get(thread)
    if running is None or running.handlers is None:
        return
    if running.ended or monotonic() - running.began >= running.longest_s:
        _end(running, frame, running.ended or f"it had not returned after {running.longest_s:g} s")
    for ending in _ENDING:
        handler = signal.getsignal(ending)
        # What ends the process at once needs no help, and what is ignored stays so.
        if callable(handler) and handler is not _told_to_end:
            running.handlers[ending] = handler
            signal.signal(ending, _told_to_end)


def _told_to_end(number: int, frame: FrameType | None) -> None:
    """The process is to end: so is the function that keeps others from hearing of it."""
    running = _calls.get(threading.get_ident())
    if running is None or running.handlers is None:
        return
    _ended_at.append(monotonic())
    told, seconds = signal.Signals(number), _ended_at[-1] - running.began
    handler = running.handlers[told]
    _restore(running.handlers)
    handler(number, frame)
    _end(running, frame, f"{told.name} ended it after {seconds:.1f} s")


def _end(running: _Call, frame: FrameType | None, why: str) -> NoReturn:
    """Raise where the function is; one that was told so before is also told at the next line that it runs.

    That line is outside of the ``try`` whose ``except`` catches the first, though not of one around it.
    """
    _restore(running.handlers or {})
    running.handlers = {}
    if not running.ended:
        running.ended = why
        running.tracer = sys.gettrace()
        raise TookTooLong(why)

    def again(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            raise TookTooLong(why)
        return again

    stack = []
    while frame is not None and frame.f_code is not call.__code__:
        stack.append(frame)
        frame = frame.f_back
    for own in stack:
        # What a library does before it passes an exception on is left alone.
        if own.f_code.co_filename == stack[-1].f_code.co_filename:
            own.f_trace = again
    sys.settrace(_untraced)
    raise TookTooLong(why)


def _untraced(frame: FrameType, event: str, argument: object) -> None:
    """What the function calls meanwhile goes on."""


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
