"""A process that is forked from the router's and leaves as it came takes nothing with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKED = """
import asyncio, os, sys
import psutil
from tokenflow import Router
from tokenflow.eventloop import new_event_loop

async def main():
    async with Router("recipes/sim.yaml") as router:
        running = asyncio.ensure_future(router.generate("Q", max_tokens=200))
        await router.generate("Q", max_tokens=4)
        workers = psutil.Process().children()
        if (pid := os.fork()) == 0:
            {way}
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        done = await running
        assert len(done.tokens) == 200, done
        await router.generate("Q", max_tokens=4)
        assert workers and all(worker.is_running() for worker in workers)
        assert not sum(model.restarts for model in router.status.models)
        return f"parent: the child ended with {{os.waitstatus_to_exitcode(status)}}"

with asyncio.Runner(loop_factory={loop}) as runner:
    print(runner.run(main()), flush=True)
"""

INHERITED = """
import asyncio, os, sys
import psutil
from tokenflow import Router

router = Router("recipes/sim.yaml")

async def main():
    async with router:
        assert len((await router.generate("Q", max_tokens=4)).tokens) == 4
        assert psutil.Process().children()
    assert not psutil.Process().children()

if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("way", "code", "loop"),
    [
        ("return 'child'", 0, "asyncio.new_event_loop"),
        ("raise ValueError('child')", 1, "asyncio.new_event_loop"),
        ("sys.exit(5)", 5, "asyncio.new_event_loop"),
        ("os._exit(6)", 6, "asyncio.new_event_loop"),
        # On its way out, a child of uvloop's would write to the parent's io_uring: see docs/faults.md.
        ("os._exit(6)", 6, "new_event_loop"),
    ],
)
def test_a_forked_process_that_leaves_lets_the_router_go_on(way: str, code: int, loop: str) -> None:
    script = FORKED.format(way=way, loop=loop)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"parent: the child ended with {code}"
    assert "tokenflow" not in done.stderr


def test_a_router_that_was_made_before_a_fork_is_entered_and_left_after_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INHERITED], capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0, done.stderr
