"""KV cache that is shared: between models of a device, and between more requests than fit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.recipes import toy_pair
from tests.test_router import Log, expected_pair
from tokenflow.errors import ContextTooLong, ModelLoadError
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

PROMPTS = [[1, 30 + i % 60, 20 + i % 7] for i in range(64)]


async def test_models_that_load_at_the_same_time_divide_their_device(tmp_path: Path) -> None:
    claims = {"slm": ["gpu", 10_000, 10_000, 1000, 1, 9999], "llm": ["gpu", 9_000, 9_000, 2000, 2, 9999]}
    recipe = toy_pair(tmp_path, slm={"claim": claims["slm"]}, llm={"claim": claims["llm"]})
    async with Router(recipe) as router:
        answer = await router.generate([1, 40, 50, 60], max_tokens=20)
        assert (answer.token_ids, answer.models) == expected_pair([1, 40, 50, 60], 20)
        assert router._system is not None
        assert router._system._ledger.longest == 2000


async def test_models_that_do_not_fit_are_refused_before_they_load(tmp_path: Path) -> None:
    recipe = toy_pair(
        tmp_path,
        slm={"claim": ["gpu", 2**30, 2**30, 2**29, 2**10, 9999], "fail_load": "it has begun to load"},
        llm={"claim": ["gpu", 2**30, 2**30, 2**29, 2**10, 9999], "fail_load": "it has begun to load"},
    )
    with pytest.raises(ModelLoadError) as caught:
        async with Router(recipe):
            pass
    assert str(caught.value).startswith(
        "gpu cannot hold its models: 1 GiB of it may be used, and they take 1 GiB, 256 tokens of KV cache"
    )


async def test_with_room_for_four_of_64_clients_all_are_served_in_turn(tmp_path: Path) -> None:
    log = Log()
    recipe = toy_pair(tmp_path, slm={"kv_capacity": 4 * 24}, llm={"kv_capacity": 4 * 24, "block_size": 4})
    async with Router(recipe, observer=log) as router:
        done = await asyncio.gather(*(router.generate(prompt, max_tokens=20) for prompt in PROMPTS))
        with pytest.raises(ContextTooLong, match="KV cache of 96"):
            await router.generate([1] * 90, max_tokens=20)
    assert [(a.token_ids, a.models) for a in done] == [expected_pair(prompt, 20) for prompt in PROMPTS]
    assert any(opened.epoch for _, step, _ in log.steps for opened in step.open), "nothing was preempted"
    first = [
        opened.handle
        for name, step, _ in log.steps
        for opened in step.open
        if not opened.epoch and name == "slm"
    ]
    assert first == sorted(first), "somebody who came later was served earlier"
    waits, service = [a.timing.ttft_s for a in done], [a.timing.latency_s - a.timing.ttft_s for a in done]
    assert max(waits) <= 16 * max(service)
