"""What is wrong with one request is nobody else's business."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.recipes import chaos_pair
from tests.faults.test_state import mortal
from tests.faults.test_supervision import EXPECTED, PROMPTS, answers
from tests.recipes_python import handoffs
from tests.test_router import Log
from tokenflow.errors import ContextTooLong, NonFiniteLogits, RouteFailed
from tokenflow.router import Router
from tokenflow.types import Completion

pytestmark = pytest.mark.anyio

GOOD = [[1, 40 + i, 50] for i in range(27)]
NAN = 99


async def test_nan_a_route_that_raises_and_a_prompt_too_long_fail_alone_among_thirty(tmp_path: Path) -> None:
    async with Router(mortal(tmp_path / "calm", handoffs.faulty, {})) as router:
        expected = await router.generate_many(GOOD, concurrency=1, max_tokens=12, logit_bias={NAN: -100.0})
    log = Log()
    lives = {"slm": [{"nan_token": NAN}], "llm": [{"nan_token": NAN}]}
    async with Router(mortal(tmp_path / "wild", handoffs.faulty, lives), observer=log) as router:
        results = await asyncio.gather(
            *(router.generate(prompt, max_tokens=12, logit_bias={NAN: -100.0}) for prompt in GOOD),
            router.generate([1, NAN], max_tokens=12),
            router.generate(GOOD[0], max_tokens=12, ignore_eos=True, params={"fault": 1}),
            router.generate([1] * 100_000, max_tokens=12),
            return_exceptions=True,
        )
        assert [status.restarts for status in router.status.models] == [0, 0]
    *good, nan, raised, long = results
    assert [type(result) for result in (nan, raised, long)] == [NonFiniteLogits, RouteFailed, ContextTooLong]
    assert all(isinstance(result, Completion) for result in good)
    assert [(r.token_ids, r.models) for r in good] == [(e.token_ids, e.models) for e in expected]
    assert max(len(step.rows) for _, step, _ in log.steps) > 20, "they did not run together"


async def test_a_step_of_nan_fails_who_was_in_it_and_the_worker_goes_on(tmp_path: Path) -> None:
    async with Router(chaos_pair(tmp_path, slm=[{"nan_at": 3}])) as router:
        results = await asyncio.gather(
            *(router.generate(prompt, max_tokens=24) for prompt in PROMPTS), return_exceptions=True
        )
        kinds = Counter(type(result) for result in results)
        assert kinds[NonFiniteLogits] > 0 and set(kinds) <= {NonFiniteLogits, Completion}
        assert await answers(router) == EXPECTED
        assert [status.restarts for status in router.status.models] == [0, 0]
