"""Starting the process that a worker runs in."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tokenflow.actors.child import spawn


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_program_that_cannot_be_run_is_named_whatever_the_event_loop(
    new_event_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.touch(mode=0o600)

    async def start() -> None:
        null = os.open(os.devnull, os.O_RDWR)
        try:
            await spawn(null, null, 1, (str(program),))
        finally:
            os.close(null)

    with (
        asyncio.Runner(loop_factory=new_event_loop) as runner,
        pytest.raises(PermissionError, match=re.escape(str(program))),
    ):
        runner.run(start())
