"""The router's end of the nursery, which forks worker processes in milliseconds.

See :mod:`tokenflow.worker.nursery`.  It is started with the first worker, and again when it was lost; the
workers that came from it go with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque

import anyio

from tokenflow.actors.child import Child, spawn
from tokenflow.actors.fork import keep_from_forks
from tokenflow.actors.words import LastWords
from tokenflow.errors import ProtocolError, WorkerDied
from tokenflow.wire.nursery import MAX_PACKET, Exited, Fork, Forked, Warm, decode_from_nursery, encode

COMMAND = (sys.executable, "-P", "-m", "tokenflow.worker.nursery")
AVAILABLE = sys.platform == "linux"
"""It needs packets over local sockets."""

_WARM_S = 300.0
_BIRTH_S = 10.0
_BURIAL_S = 1.0
_STOP_GRACE_S = 1.0

log = logging.getLogger("tokenflow.nursery")


class Nursery:
    """One nursery process after the other, as they are needed."""

    def __init__(self) -> None:
        self._process: _Process | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was needed."""
        return self._process.child.pid if self._process else 0

    async def launch(self, channel: int, stderr: int, threads: int) -> Child:
        """A :data:`tokenflow.actors.child.Launch`; :raises WorkerDied: if the nursery ends meanwhile."""
        process = await self.warm_up()
        return await process.fork(channel, stderr, threads)

    async def warm_up(self) -> _Process:
        """Start it if it does not run, and wait until it can fork."""
        async with self._starting:
            if self._process is None or self._process.lost:
                self._process = await _Process.start()
            process = self._process
        with process.child.awake(), anyio.move_on_after(_WARM_S):
            await process.warm.wait()
            return process
        raise await process.give_up(f"{_WARM_S:g} s in which it was not ready")

    async def stop(self) -> None:
        """End the nursery; its workers must be gone."""
        if self._process is not None:
            await self._process.stop()


class _Process:
    """A nursery process; ``warm`` is set when it can fork, or never will: then it is ``lost``."""

    def __init__(self, sock: socket.socket, child: Child, words: LastWords) -> None:
        self.child = child
        self.warm = asyncio.Event()
        self.lost = False
        self._sock = sock
        self._words = words
        self._births: deque[asyncio.Future[Child]] = deque()
        self._workers: dict[int, Child] = {}
        self._stopping = False
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read)

    @classmethod
    async def start(cls) -> _Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        keep_from_forks(ours)
        words = LastWords("nursery")
        with theirs:
            try:
                stderr = words.open()
                try:
                    child = await spawn(theirs.fileno(), stderr, 1, COMMAND)
                finally:
                    os.close(stderr)
            except BaseException:
                ours.close()
                words.close()
                raise
        process = cls(ours, child, words)
        child.when_ended(process._ended)
        return process

    async def fork(self, channel: int, stderr: int, threads: int) -> Child:
        birth: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._sock, [encode(Fork(threads))], [channel, stderr])
        except OSError:
            raise await self._death() from None
        self._births.append(birth)
        try:
            with self.child.awake(), anyio.move_on_after(_BIRTH_S):
                return await birth
        except EOFError:
            raise await self._death() from None
        except asyncio.CancelledError:
            if birth.done() and not birth.cancelled() and birth.exception() is None:
                # It was born while the cancellation was on its way: nobody else knows of it.
                birth.result().kill_group(signal.SIGKILL)
            raise
        raise await self.give_up(f"{_BIRTH_S:g} s in which no worker came")

    async def stop(self) -> None:
        self._stopping = True
        self._close()
        with self.child.awake(), anyio.move_on_after(_STOP_GRACE_S):
            await self.child.wait()
        self.child.kill_group(signal.SIGKILL)
        await self.child.wait()
        self._words.close()

    async def give_up(self, after: str) -> WorkerDied:
        """End it, because it did not answer; returns the error that says so."""
        self._lost()
        return await self._death(after)

    async def _death(self, after: str = "") -> WorkerDied:
        code = await self.child.wait()
        with anyio.move_on_after(_STOP_GRACE_S):
            await self._words.closed.wait()
        self._words.close()
        return WorkerDied(f"the nursery (pid {self.child.pid}) ended with {self._words.ending(code, after)}")

    def _read(self) -> None:
        try:
            packet = self._sock.recv(MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._lost()
            return
        try:
            message = decode_from_nursery(packet)
        except ProtocolError:
            self._lost()
            return
        match message:
            case Warm():
                self.warm.set()
            case Forked(pid=0, error=error):
                birth = self._births.popleft()
                if not birth.done():
                    birth.set_exception(WorkerDied(f"no worker can be forked: {error}"))
            case Forked(pid=pid):
                child = self._workers[pid] = Child(pid)
                self._watch(child)
                birth = self._births.popleft()
                if birth.done():  # nobody waits for it any more
                    child.kill_group(signal.SIGKILL)
                else:
                    birth.set_result(child)
            case Exited(pid=pid, code=code):
                if (dead := self._workers.pop(pid, None)) is not None:
                    dead.ended(code)

    def _watch(self, child: Child) -> None:
        """See the end of a worker also where the nursery does not: one that hangs buries nobody."""
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError:  # it is gone already, or the kernel does not know how
            return

        def over() -> None:
            loop.remove_reader(pidfd)
            self.child.kill(signal.SIGCONT)
            loop.call_later(_BURIAL_S, self._unburied, child)

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)

        loop.add_reader(pidfd, over)
        child.when_ended(ended)

    def _unburied(self, child: Child) -> None:
        if self._workers.get(child.pid) is child:
            del self._workers[child.pid]
            child.ended(None)

    def _ended(self) -> None:
        if self._workers and not self._stopping:
            cause = self._words.ending(self.child.code)
            log.error("the nursery (pid %d), and all workers with it, ended with %s", self.child.pid, cause)
        self._lost()

    def _lost(self) -> None:
        """The nursery is gone: whatever becomes of its workers would not be seen, so they go as well."""
        if self.lost:
            return
        self._close()
        self.lost = True
        self.child.kill_group(signal.SIGKILL)
        self.warm.set()
        for birth in self._births:
            if not birth.done():
                birth.set_exception(EOFError())
        for worker in self._workers.values():
            worker.kill_group(signal.SIGKILL)
            worker.ended(None)

    def _close(self) -> None:
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
