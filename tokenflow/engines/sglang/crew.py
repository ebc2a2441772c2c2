"""All ranks of a model: the first in this process, the others in processes of their own.

An order goes to the others first and is then carried out here, so all ranks do the same in the same order.
Each end of a socketpair closes with its process: the others leave when the first one is gone, and the first
one when any other is, since none can go on without it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from tokenflow.engines.sglang.load import HOST, lone_meeting, place_of
from tokenflow.engines.sglang.orders import Leave, Load, Order, encode
from tokenflow.engines.sglang.rank import Rank, Result
from tokenflow.types import ModelConfig
from tokenflow.wire.watch import HANGUP

COMMAND = (sys.executable, "-P", "-m", "tokenflow.engines.sglang.follower")
_EXIT_RANK_LOST = 4
_LEAVE_S = 3


class Crew:
    """The ranks of a model; see :class:`tokenflow.engines.sglang.rank.Rank` for the parameters.

    :param command: what is run for each further rank, with the number of its end of a socketpair added.
    :param first: makes the first rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        cuda_graphs: bool,
        load_format: str,
        command: Sequence[str] = COMMAND,
        first: Callable[..., Rank] = Rank,
    ) -> None:
        ranks = config.tensor_parallel
        place_of(config.device, ranks - 1)
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._leaving = False
        store: Store
        if ranks == 1:
            store, meeting = HashStore(), lone_meeting()
        else:
            store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            meeting = store.port
            for rank in range(1, ranks):
                self._hire(command, Load(config, rank, meeting, cuda_graphs, load_format))
            Thread(target=self._watch, daemon=True).start()
        self._rank = first(config, 0, store, meeting, cuda_graphs=cuda_graphs, load_format=load_format)

    @property
    def runner(self) -> Any:
        """SGLang's ``ModelRunner`` of the first rank."""
        return self._rank.runner

    def do(self, order: Order) -> Result | Tensor | None:
        """Have every rank carry out an order; what it gives on the first one."""
        if self._sockets:
            frame = encode(order)
            for sock in self._sockets:
                sock.sendall(frame)
        return self._rank.do(order)

    def close(self) -> None:
        """Let the other ranks go."""
        self._leaving = True
        for sock in self._sockets:
            with contextlib.suppress(ConnectionError):
                sock.sendall(encode(Leave()))
        for process in self._processes:
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for sock in self._sockets:
            sock.close()
        self._rank.close()

    def _hire(self, command: Sequence[str], load: Load) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._processes.append(subprocess.Popen([*command, str(number)], pass_fds=(number,)))
        ours.sendall(encode(load))
        self._sockets.append(ours)

    def _watch(self) -> None:
        """Leave with an error as soon as another rank is gone."""
        poll = select.poll()
        for sock in self._sockets:
            poll.register(sock, HANGUP)
        poll.poll()
        if not self._leaving:
            os.write(2, b"a tensor-parallel rank is gone; the model cannot go on without it\n")
            os._exit(_EXIT_RANK_LOST)
