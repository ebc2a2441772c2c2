"""300 prompts, five thresholds of the rule, three concurrencies, three settings of delayed batching."""

from __future__ import annotations

import pytest

from tests.exactness import unexcused
from tests.reference.cases import TAUS, r_stitch
from tests.reference.record import load_traces
from tokenflow.router import Router

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("thresholds", [(1, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize("concurrency", [1, 4, 16])
async def test_every_answer_and_its_trace_equal_the_naive_reference(
    thresholds: tuple[int, int], concurrency: int
) -> None:
    recorded = load_traces()
    slm, llm = thresholds
    overrides = [f"batching.thresholds.slm={slm}", f"batching.thresholds.llm={llm}"]
    wrong = []
    async with Router("recipes/demo.yaml", overrides=overrides) as router:
        for tau in TAUS:
            wrong += await unexcused(router, recorded, r_stitch(tau), concurrency, range(300), {"tau": tau})
    assert not wrong
