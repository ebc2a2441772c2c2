"""What a process writes to its standard error, and the descriptor it comes through."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest

from tokenflow.actors import words
from tokenflow.actors.words import LastWords

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    return "asyncio", {"use_uvloop": request.param}


async def test_lines_are_kept_until_nobody_can_write_any_more() -> None:
    last = LastWords("m")
    with os.fdopen(last.open(), "wb", buffering=0) as stderr:
        stderr.write(b"first\nsec")
        stderr.write(b"ond\nthe end")
    async with asyncio.timeout(5):
        await last.closed.wait()
    assert list(last.lines) == ["first", "second", "the end"]
    last.close()
    assert last.ending(3) == "exit code 3; its last words:\n  first\n  second\n  the end"


@pytest.mark.parametrize("end", ["of the writer", "of the reader"])
async def test_a_descriptor_is_closed_once_for_it_may_be_somebody_else_s_at_once(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    close = os.close

    def closed_and_taken(number: int) -> None:
        """Close a descriptor, and let another file have its number."""
        close(number)
        taken.append(os.dup2(null, number))

    null = os.open(os.devnull, os.O_RDONLY)
    last = LastWords("m")
    writing = last.open()
    monkeypatch.setattr(words.os, "close", closed_and_taken)
    if end == "of the writer":
        close(writing)
    else:
        last.close()
    async with asyncio.timeout(5):
        await last.closed.wait()
    last.close()
    del last
    gc.collect()
    for _ in range(3):
        await asyncio.sleep(0)
    monkeypatch.undo()
    (number,) = taken
    os.close(number)  # which fails if it was closed a second time
    os.close(null)
    if end == "of the reader":
        os.close(writing)
