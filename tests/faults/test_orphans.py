"""A router that is killed leaves nothing behind, whoever still holds what it held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

GONE_S = 3.0
ROUTER = """
import asyncio, ctypes, sys
from tokenflow import Router

async def main():
    async with Router(sys.argv[1]) as router:
        libc = ctypes.PyDLL(None)
        # As code that is not Python would: no handler of Python's sees it.
        if (pid := libc.fork()) == 0:
            libc.sleep(60)
            libc._exit(0)
        print(pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def one_nursery() -> None:
    """Each of these routers is a process of its own."""


@contextmanager
def router(recipe: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A router that serves a recipe, and a process that was forked from it and holds all that it holds."""
    process = subprocess.Popen([sys.executable, "-c", ROUTER, recipe], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        holder = psutil.Process(int(process.stdout.readline()))
        try:
            yield process, holder
        finally:
            holder.kill()
            process.kill()


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("recipe", ["recipes/demo.yaml", "recipes/sim.yaml"])
def test_workers_and_nursery_go_with_a_router_whose_descriptors_live_on(recipe: str, stopped: bool) -> None:
    with router(recipe) as (process, holder):
        children = [c for c in psutil.Process(process.pid).children(recursive=True) if c != holder]
        assert len(children) >= 2
        if stopped:
            for child in children:
                os.kill(child.pid, signal.SIGSTOP)
        process.kill()
        _, left = psutil.wait_procs(children, timeout=GONE_S)
        alive = [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
        for child in alive:
            child.kill()
        assert holder.is_running()
        assert not alive
