"""A recipe that says so goes on without a model that is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.recipes import Lives, chaos_pair
from tests.faults.test_supervision import EXPECTED, PROMPTS
from tokenflow.dsl.ir import RecipeIR
from tokenflow.errors import WorkerDied
from tokenflow.router import Router
from tokenflow.types import Completion

pytestmark = pytest.mark.anyio

FALLS = [{"kill_at": 3}, *[{"die_loading": 1}] * 9]
"""Its second worker never loads: with ``restarts=1`` that is the end."""


def degrading(folder: Path, slm: Lives = (), llm: Lives = ()) -> RecipeIR:
    return replace(chaos_pair(folder, slm, llm, restarts=1), on_failure="degrade")


async def ask(router: Router, member: str | None = None) -> list[Completion]:
    return await router.generate_many(PROMPTS, max_tokens=24, member=member)


def written(done: Sequence[Completion]) -> list[tuple[list[int], list[str]]]:
    return [(answer.token_ids, answer.models) for answer in done]


async def until_given_up(router: Router, model: str) -> None:
    async with asyncio.timeout(20):
        while condition(router, model) != "down":  # noqa: ASYNC110 (nobody is told)
            await asyncio.sleep(0.01)


def condition(router: Router, model: str) -> str:
    return next(status.condition for status in router.status.models if status.name == model)


@pytest.mark.parametrize("gone", ["slm", "llm"], ids=["the entry", "its peer"])
async def test_all_are_answered_and_later_ones_as_by_what_is_left_alone(tmp_path: Path, gone: str) -> None:
    left = "llm" if gone == "slm" else "slm"
    async with Router(degrading(tmp_path, **{gone: FALLS})) as router:
        during = await ask(router)
        await until_given_up(router, gone)
        after = await ask(router)
        alone = await ask(router, member=left)
        assert router.down is None
        assert all(status.waiting == 0 for status in router.status.models)
    assert {len(answer.tokens) for answer in during} <= set(range(1, 25))
    assert gone in {model for answer in during for model in answer.models}
    assert written(during) != EXPECTED
    assert written(after) == written(alone)
    assert {model for answer in after for model in answer.models} == {left}


async def test_who_asks_for_the_model_that_is_gone_is_told(tmp_path: Path) -> None:
    async with Router(degrading(tmp_path, llm=FALLS)) as router:
        await ask(router)
        await until_given_up(router, "llm")
        with pytest.raises(WorkerDied, match=r"^without llm, no model of the recipe may go on"):
            await ask(router, member="llm")
        assert len(await ask(router, member="slm")) == len(PROMPTS)


async def test_without_any_model_everything_ends(tmp_path: Path) -> None:
    async with Router(degrading(tmp_path, slm=FALLS, llm=FALLS)) as router:
        results = await asyncio.gather(
            *(router.generate(prompt, max_tokens=60, ignore_eos=True) for prompt in PROMPTS),
            return_exceptions=True,
        )
        assert all(isinstance(result, WorkerDied) for result in results)
        assert isinstance(router.down, WorkerDied)
        with pytest.raises(WorkerDied, match="is given up: 2 of its workers died in a row"):
            await ask(router)
