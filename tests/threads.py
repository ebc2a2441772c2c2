"""Workers as threads: the worker's own loop over a socketpair, without the seconds that a process takes to
import torch."""

from __future__ import annotations

import asyncio
import socket
from threading import Thread

from anyio import to_thread
from anyio.abc import TaskGroup

from tokenflow.actors.process import WorkerProcess
from tokenflow.wire.channel import Channel
from tokenflow.wire.messages import Ready, Stop
from tokenflow.worker.loop import serve


class WorkerThread(WorkerProcess):
    """A worker inside this process; it ends when it is asked to, or with an error of its own."""

    async def start(self, tasks: TaskGroup) -> Ready:
        self._ready = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._channel = await Channel.connect(ours, self)
        self._thread = Thread(target=_run, args=(theirs,), name=f"{self.hello.model}.worker")
        self._thread.start()
        self._channel.send(self.hello)
        tasks.start_soon(self._watch, name=f"{self.hello.model}.watch")
        return await self._ready

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        if self._channel is not None:
            self._channel.send(Stop())
            await self._buried()
            self._channel.close()

    async def _watch(self) -> None:
        await self._over.wait()
        self.error = self._explain(await self._buried())
        if not self._stopping:
            self.died.set()
        self._fail_waiting()

    async def _buried(self) -> int:
        await to_thread.run_sync(self._thread.join)
        return 0


def _run(sock: socket.socket) -> None:
    with sock:
        serve(sock)
