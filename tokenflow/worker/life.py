"""The life of a worker process, however it came to be, from its first moment to its exit.

Heavy imports come after the death watch is set, so that a router killed while a worker is still loading
leaves nothing behind.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from tokenflow.wire.watch import Parent, exit_with, go_on_with_parent


def prepare() -> None:
    """What is the same for every process on this side."""
    faulthandler.enable()
    go_on_with_parent()
    # Ctrl-C reaches the whole terminal: it is the router's business to stop its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a recipe prints must not end up in the router's standard output.
    os.dup2(2, 1)


def live(sock: socket.socket, parent: Parent) -> NoReturn:
    """Serve the router at the other end of ``sock`` until it stops us or is gone, or ``parent`` is."""
    # The router asks for the stacks of a worker that does not answer.
    faulthandler.register(signal.SIGUSR1)
    # A program that an engine starts must not keep the channel open beyond this process.
    sock.set_inheritable(False)
    threading.Thread(target=exit_with, args=(sock.fileno(), parent), daemon=True).start()
    from tokenflow.worker.loop import serve

    code = serve(sock)
    # Nothing is left to tidy up, and unloading torch would take longer than loading it.
    sys.stderr.flush()
    os._exit(code)
