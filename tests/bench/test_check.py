"""Equal outputs are a proof only where a system that had lost what it read would write something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import shapes
from bench.compare import check, work
from bench.compare.on_transformers import Official
from bench.compare.results import Results
from bench.compare.servers import SYSTEMS

pytestmark = pytest.mark.anyio
FULL = [1] * check.WORKLOAD.output


async def test_what_a_sample_writes_hangs_on_what_it_has_read_long_ago(tmp_path: Path) -> None:
    path = shapes.write_model(tmp_path, shapes.TINY, spread=check.SPREAD)
    loop = Official()
    await loop.open([path, path], "float32")
    for index in range(4):
        prompt = work.prompt(index, check.WORKLOAD.prompt)
        written: list[list[int]] = []
        for first in (prompt[0], prompt[0] ^ 1):
            tokens: list[int] = []
            await loop.generate(
                index, [first, *prompt[1:]], "A" * 32, "visit", lambda token, _, to=tokens: to.append(token)
            )
            written.append(tokens)
        assert len({*written[0]}) > 4
        assert written[0] != written[1]


@pytest.mark.parametrize(
    ("found", "different"),
    [
        ({"a": FULL, "b": FULL}, []),
        ({"a": FULL, "b": [*FULL[:-1], 2]}, ["r2r"]),
        ({"a": FULL, "b": FULL[:-1]}, ["r2r"]),
        ({"a": FULL[:-1], "b": FULL[:-1]}, ["r2r"]),
    ],
)
def test_outputs_differ_by_a_token_or_where_one_is_missing(
    tmp_path: Path, found: dict[str, list[int]], different: list[str]
) -> None:
    results = Results(tmp_path / "results.json")
    assert check._compare({"r2r": found}, work.SMALL_PAIR, SYSTEMS, results) == different
    assert results.check[work.SMALL_PAIR.name]["different"] == different
