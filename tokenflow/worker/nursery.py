"""The nursery: a process that has imported what a worker needs, and forks one whenever it is asked to.

``python -m tokenflow.worker.nursery FD PID``: FD is its end of a socketpair of packets, PID the router that
starts it.  To import torch takes seconds, to fork milliseconds; and what all workers have imported is in
memory once.  The nursery itself never uses torch: a process that has done so cannot be forked safely.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
from typing import NoReturn

from tokenflow.settings import limit_threads
from tokenflow.wire.nursery import MAX_PACKET, Exited, Forked, Warm, decode_fork, encode
from tokenflow.wire.watch import HANGUP, Parent
from tokenflow.worker.life import live, prepare


class Nursery:
    """Serves the router at the other end of ``sock``, its ``parent``, until it hangs up or is gone."""

    def __init__(self, sock: socket.socket, parent: Parent) -> None:
        self._sock = sock
        self._parent = parent
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    def warm_up(self) -> None:
        """Import what workers will, unless the router is gone meanwhile; no thread is left afterwards."""
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        import tokenflow.engines.torch
        import tokenflow.worker.loop
        import tokenflow.worker.model  # noqa: F401

        os.write(self._writing, b"\0")
        watch.join()
        os.read(self._reading, 1)
        # What is imported is shared with all children, as long as nobody writes to it.
        gc.collect()
        gc.freeze()

    def serve(self) -> NoReturn:
        """Fork and bury."""
        signal.set_wakeup_fd(self._writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._send(Warm())
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._reading, select.POLLIN)
        patience = self._parent.attend(poll)
        while not self._parent.gone:
            for fd, _ in poll.poll(patience):
                if fd == self._reading:
                    os.read(self._reading, MAX_PACKET)
                    self._bury()
                elif fd == self._sock.fileno():
                    self._fork()
        os._exit(0)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._sock, HANGUP)
        poll.register(self._reading, select.POLLIN)
        patience = self._parent.attend(poll)
        heard: list[tuple[int, int]] = []
        while not heard and not self._parent.gone:
            heard = poll.poll(patience)
        if all(fd != self._reading for fd, _ in heard):
            os._exit(0)

    def _fork(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._sock, MAX_PACKET, 2)
        except ConnectionError:
            packet = b""
        if not packet:
            os._exit(0)
        request = decode_fork(packet)
        sys.stderr.flush()
        nursery = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send(Forked(0, str(error)))
            pid = -1
        if pid == 0:
            try:
                channel, stderr = descriptors
                self._become_worker(channel, stderr, request.threads, Parent(nursery))
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            # Here as well as there, so that the router can signal the group whichever is faster.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._send(Forked(pid))

    def _become_worker(self, channel: int, stderr: int, threads: int, parent: Parent) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._sock.detach(), self._reading, self._writing):
            os.close(descriptor)
        self._parent.close()
        os.setpgid(0, 0)
        os.dup2(stderr, 2)
        os.close(stderr)
        prepare()
        limit_threads(threads)
        live(socket.socket(fileno=channel), parent)

    def _bury(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _send(self, message: Warm | Forked | Exited) -> None:
        try:
            self._sock.send(encode(message))
        except OSError:  # the router is gone
            os._exit(0)


if __name__ == "__main__":
    prepare()
    nursery = Nursery(socket.socket(fileno=int(sys.argv[1])), Parent(int(sys.argv[2])))
    nursery.warm_up()
    nursery.serve()
