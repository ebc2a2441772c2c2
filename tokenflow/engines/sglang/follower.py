"""A further rank of a model: ``python -m tokenflow.engines.sglang.follower FD``.

FD is its end of a socketpair, on which the first rank's orders come.  It leaves with the first rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from threading import Thread
from typing import NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from tokenflow.engines.sglang.load import HOST
from tokenflow.engines.sglang.orders import Inbox, Leave, Load
from tokenflow.engines.sglang.rank import Rank
from tokenflow.wire.watch import die_with_parent, exit_with


def main() -> NoReturn:
    """Carry out orders until the first rank says so or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    die_with_parent()
    Thread(target=exit_with, args=(sock.fileno(),), daemon=True).start()
    inbox = Inbox(sock)
    load = inbox.receive()
    if not isinstance(load, Load):
        raise TypeError(f"the first order must be to load, got {load!r:.80}")
    torch.set_num_threads(load.config.threads)
    store = TCPStore(HOST, load.port, is_master=False)
    rank = Rank(
        load.config,
        load.rank,
        store,
        load.port,
        cuda_graphs=load.cuda_graphs,
        load_format=load.load_format,
    )
    while not isinstance(order := inbox.receive(), Leave):
        rank.do(order)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
