"""Start of a worker process: ``python -m tokenflow.worker FD``, where FD is its end of a socketpair."""

from __future__ import annotations

import socket
import sys

from tokenflow.worker.life import live, prepare

if __name__ == "__main__":
    prepare()
    live(socket.socket(fileno=int(sys.argv[1])))
