"""Event loops: the command line's is uvloop's where that is installed; a router keeps to its own."""

from __future__ import annotations

import asyncio

from tokenflow.limits import require_files

_FILES = 16


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new event loop; :raises TokenflowError: if this process cannot open enough files for one."""
    require_files(_FILES)
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def require_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse what would wait for ever: futures of one event loop do not wake up the tasks of another.

    :raises RuntimeError: if ``loop`` is not the one that runs here.
    """
    if asyncio.get_running_loop() is not loop:
        raise RuntimeError(
            "this router was entered in another event loop: use it there, from a thread by "
            "asyncio.run_coroutine_threadsafe(router.generate(...), loop)"
        )
