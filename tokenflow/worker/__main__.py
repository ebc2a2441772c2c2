"""Start of a worker process: ``python -m tokenflow.worker FD PID``.

FD is its end of a socketpair, PID the process that starts it.
"""

from __future__ import annotations

import socket
import sys

from tokenflow.wire.watch import Parent
from tokenflow.worker.life import live, prepare

if __name__ == "__main__":
    prepare()
    live(socket.socket(fileno=int(sys.argv[1])), Parent(int(sys.argv[2])))
