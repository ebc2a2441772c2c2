"""Workers as threads: the worker's own loop over a socketpair, without the seconds that a process takes to
import torch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from threading import Thread

from tokenflow.actors.child import Child
from tokenflow.worker.loop import serve


class WorkerThread(Child):
    """A worker inside this process; it ends when it is asked to, or with an error of its own."""

    def kill(self, number: signal.Signals) -> None:
        """A thread has no signals."""

    kill_group = kill


class ThreadNursery:
    """Takes the place of :class:`tokenflow.actors.nursery.Nursery`."""

    async def launch(self, channel: int, stderr: int, threads: int) -> Child:
        loop, child = asyncio.get_running_loop(), WorkerThread(os.getpid())

        def run() -> None:
            with sock:
                serve(sock)
            loop.call_soon_threadsafe(child.ended, 0)

        sock = socket.socket(fileno=os.dup(channel))
        Thread(target=run, name="worker").start()
        return child

    async def stop(self) -> None:
        """Threads end by themselves."""
