"""Start of a worker process: ``python -m tokenflow.worker FD``, where FD is its end of a socketpair.

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

from tokenflow.wire.watch import exit_with


def main() -> NoReturn:
    """Serve the router at the other end of the inherited socket until it stops us or is gone."""
    faulthandler.enable()
    # Ctrl-C reaches the whole terminal: it is the router's business to stop its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a recipe prints must not end up in the router's standard output.
    os.dup2(2, 1)
    sock = socket.socket(fileno=int(sys.argv[1]))
    # A program that an engine starts must not keep the channel open beyond this process.
    sock.set_inheritable(False)
    threading.Thread(target=exit_with, args=(sock.fileno(),), daemon=True).start()
    from tokenflow.worker.loop import serve

    code = serve(sock)
    # Nothing is left to tidy up, and unloading torch would take longer than loading it.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
