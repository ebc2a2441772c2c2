"""What a process that is forked from the router's may do with its copy of everything: nothing.

User code forks: a recipe, or a program around a router.  The child has the router's sockets, and an event
loop that shares its list of descriptors (epoll) with the parent's.  Whatever it lets go of on its way out, an
exception or the end of ``asyncio.run`` say, its parent would lose; and what its tasks say in their last
moments, the workers would hear.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from weakref import WeakSet

_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
_sockets: WeakSet[socket.socket] = WeakSet()


class Owner:
    """The process that something belongs to."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process, and not one that was forked from it."""
        return os.getpid() == self._pid


def keep_from_forks(sock: socket.socket) -> None:
    """A forked process gets ``sock`` hung up, and a copy of the running event loop that hears nothing."""
    _sockets.add(sock)
    _loops.add(asyncio.get_running_loop())


def _part() -> None:
    """In a forked process: put what concerns nobody else in the place of what it shares with its parent."""
    hung_up, other = socket.socketpair()
    other.close()
    with hung_up:
        for sock in _sockets:
            if sock.fileno() >= 0:
                os.dup2(hung_up.fileno(), sock.fileno(), inheritable=False)
    for loop in _loops:
        if (epoll := _epoll(loop)) >= 0:
            with select.epoll() as nothing:
                os.dup2(nothing.fileno(), epoll, inheritable=False)
    _sockets.clear()
    _loops.clear()


def _epoll(loop: asyncio.AbstractEventLoop) -> int:
    """Descriptor of an event loop's epoll; -1 if it has none. There is no official way to it."""
    if not hasattr(select, "epoll") or loop.is_closed():
        return -1
    if (backend := getattr(loop, "_get_backend_id", None)) is not None:  # uvloop
        return int(backend())
    epoll = getattr(getattr(loop, "_selector", None), "_selector", None)
    return epoll.fileno() if isinstance(epoll, select.epoll) else -1


def _forked() -> None:
    # Where no file can be opened any more, a child that only runs another program must not be kept from it:
    # uvloop starts those with Python's fork.
    with contextlib.suppress(OSError):
        _part()


os.register_at_fork(after_in_child=_forked)
