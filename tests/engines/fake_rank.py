"""Ranks without a model: each writes down the orders that it carries out.

As a program it is a further rank, ``python -m tests.engines.fake_rank FD``, which dies at an order to copy
from place 666.  ``python -m tests.engines.fake_rank first RANKS FILE`` is a first rank of that many: it says
when they are there, and then carries out what stands on its standard input.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from threading import Thread
from typing import Any

from tokenflow.engines.sglang.crew import Crew
from tokenflow.engines.sglang.orders import Copy, Inbox, Leave, Load, Order
from tokenflow.types import ModelConfig
from tokenflow.wire.watch import die_with_parent, exit_with

COMMAND = (sys.executable, "-P", "-m", "tests.engines.fake_rank")


class FakeRank:
    """Writes its orders into the folder that the model's path names."""

    def __init__(self, config: ModelConfig, rank: int, *_: object, **__: object) -> None:
        self._file = Path(config.path) / f"rank{rank}"
        self._file.write_text(f"{os.getpid()}\n")

    def do(self, order: Order) -> None:
        """Write it down."""
        with self._file.open("a") as file:
            file.write(f"{order}\n")

    def close(self) -> None:
        """Nothing to give back."""


def crew_of(folder: Path, ranks: int) -> Crew:
    """A crew of fake ranks that write into ``folder``."""
    config = ModelConfig(path=str(folder), device="cpu", tensor_parallel=ranks)
    first: Any = FakeRank
    return Crew(config, cuda_graphs=False, load_format="", command=COMMAND, first=first)


def _follow(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    die_with_parent()
    Thread(target=exit_with, args=(fd,), daemon=True).start()
    inbox = Inbox(sock)
    load = inbox.receive()
    assert isinstance(load, Load)
    rank = FakeRank(load.config, load.rank)
    while not isinstance(order := inbox.receive(), Leave):
        if isinstance(order, Copy) and order.source == [666]:
            os._exit(9)
        rank.do(order)
    os._exit(0)


def _lead(folder: Path, ranks: int) -> None:
    crew = crew_of(folder, ranks)
    print("ready", flush=True)
    for line in sys.stdin:
        crew.do(Copy([int(line)], [0]))
    crew.close()


if __name__ == "__main__":
    if sys.argv[1] == "first":
        _lead(Path(sys.argv[3]), int(sys.argv[2]))
    else:
        _follow(int(sys.argv[1]))
