"""What a server process does with a command, and the loop over transformers that it may serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import shapes
from bench.compare import traces, work
from bench.compare.load import Emit
from bench.compare.on_transformers import Official
from bench.compare.serve import obey

pytestmark = pytest.mark.anyio

REQUESTS = [work.Request(5, "AAaBA"), work.Request(5, "AB")]
RUN = {"do": "run", "requests": [0, 1], "concurrency": 2, "variant": "visit", "salt": "s", "limit_s": 60.0}


class Writer:
    """Follows traces, unless it is told to let the second model write everything."""

    at_a_time = 1

    def __init__(self, *, astray: bool = False) -> None:
        self.astray = astray
        self.prompts: list[list[int]] = []

    async def open(self, paths: Sequence[Path], dtype: str) -> None:
        raise FileNotFoundError("no such model")

    async def generate(self, index: int, prompt: list[int], trace: str, variant: str, emit: Emit) -> None:
        self.prompts.append(prompt)
        for model in traces.writers(trace):
            emit(7, 1 if self.astray else model)

    def drain(self) -> dict[str, Any]:
        return {"steps": []}

    async def close(self) -> None:
        pass


async def test_a_run_answers_its_requests_once_for_each_twist() -> None:
    writer = Writer()
    answer = await obey(writer, REQUESTS, RUN | {"twists": [1, 2]})
    assert [record["tokens"] for record in answer["records"]] == [[7] * 4, [7] * 2] * 2
    expected = [work.prompt(index, 5, "s", twist) for twist in (1, 2) for index in (0, 1)]
    assert writer.prompts == expected
    assert answer["at_a_time"] == 1
    assert answer["notes"] == {"steps": []}


async def test_a_server_that_does_not_follow_its_trace_is_found_out() -> None:
    answer = await obey(Writer(astray=True), REQUESTS, RUN)
    assert "request 0 did not follow its trace" in answer["error"]


async def test_a_failure_is_an_answer() -> None:
    answer = await obey(Writer(), REQUESTS, {"do": "open", "paths": ["nowhere"], "dtype": "float32"})
    assert "FileNotFoundError: no such model" in answer["error"]


async def test_the_loop_writes_the_same_whether_it_has_read_the_prompt_before_or_not(tmp_path: Path) -> None:
    path = shapes.write_model(tmp_path, shapes.TINY)
    prompt, other = work.prompt(0, 40), work.prompt(0, 40, twist=1)
    loop = Official()
    await loop.open([path, path], "float32")

    async def write(prompt: list[int]) -> list[tuple[int, int]]:
        written: list[tuple[int, int]] = []
        await loop.generate(0, prompt, "AAaBBA", "visit", lambda *token: written.append(token))
        return written

    cold = await write(prompt)
    assert [model for _, model in cold] == [0, 0, 1, 1, 0]
    twisted = await write(other)
    assert await write(prompt) == cold
    fresh = Official()
    await fresh.open([path, path], "float32")
    loop = fresh
    assert await write(other) == twisted
