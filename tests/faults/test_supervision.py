"""Workers die in every way there is, and no answer changes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.recipes import chaos_pair
from tests.test_router import Log, expected_pair
from tokenflow.errors import DeadlyRequest, ModelLoadError, WorkerDied
from tokenflow.router import Router
from tokenflow.types import Completion

pytestmark = pytest.mark.anyio

PROMPTS = [[1, 40 + i, 50] for i in range(6)]
EXPECTED = [expected_pair(prompt, 24) for prompt in PROMPTS]


async def answers(router: Router) -> list[tuple[list[int], list[str]]]:
    done = await router.generate_many(PROMPTS, max_tokens=24)
    return [(answer.token_ids, answer.models) for answer in done]


@pytest.mark.parametrize(
    ("life", "said"),
    [
        ({"die_at": 5}, "ended with exit code 9; its last words:\n  chaos: dies"),
        ({"kill_at": 4}, "ended with signal 9 (SIGKILL)"),
        ({"raise_at": 3}, "model 'slm': chaos: raises"),
        ({"oom_at": 1}, "model 'slm': OutOfMemoryError: chaos: tried to allocate 1 GiB"),
        ({"no_memory_at": 2}, "model 'slm': MemoryError: chaos: not a byte is left"),
        ({"garbage_at": 6}, "after a frame of 4294967295 bytes was announced"),
        ({"stray_at": 2}, "model 'slm' was asked for ["),
        ({"hang_at": 5}, "after no answer within 0.5 s; its last words:"),
        ({"stop_at": 5}, "after no answer within 0.5 s"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, Mapping) else "",
)
async def test_answers_are_those_of_an_undisturbed_run(
    life: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = chaos_pair(tmp_path, slm=[life, life], llm=[{}], step_timeout=0.5)
    async with Router(recipe) as router:
        assert await answers(router) == EXPECTED
    deaths = [record.message for record in caplog.records if record.name == "tokenflow.supervisor"]
    assert len(deaths) == 2
    assert all(said in death and "another one is started" in death for death in deaths)


async def test_a_worker_that_hangs_is_made_to_print_its_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = chaos_pair(tmp_path, llm=[{"hang_at": 2}], step_timeout=0.5)
    async with Router(recipe) as router:
        assert await answers(router) == EXPECTED
    assert "its stack follows" in caplog.text
    assert "[llm]   File " in caplog.text and " in _hang" in caplog.text


async def test_a_model_that_keeps_dying_is_given_up_and_everybody_learns_why(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, llm=[{"die_at": 3}, *[{"kill_at": 1}] * 9], restarts=2)
    async with Router(recipe) as router:
        results = await asyncio.gather(
            *(router.generate(prompt, max_tokens=60) for prompt in PROMPTS), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, WorkerDied)]
        assert failed
        assert str(failed[0]).startswith(
            "model 'llm' is given up: 3 of its workers died in a row without completing a step; the last: "
            "worker of model 'llm' (pid "
        )
        assert str(failed[0]).endswith("ended with signal 9 (SIGKILL)")
        assert len(set(map(id, failed))) == len(failed)
        with pytest.raises(WorkerDied, match="model 'llm' is given up"):
            await router.generate(PROMPTS[0], max_tokens=4)


async def test_a_completed_step_renews_the_budget(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, slm=[{"die_at": 2}] * 6, restarts=1)
    async with Router(recipe) as router:
        assert await answers(router) == EXPECTED


async def test_a_request_of_which_workers_die_fails_and_its_neighbours_do_not(tmp_path: Path) -> None:
    poison = next(i for i in range(20, 100) if all(i not in tokens for tokens, _ in EXPECTED))
    recipe = chaos_pair(tmp_path, slm=[{"poison": poison}] * 20)
    async with Router(recipe) as router:
        good = asyncio.gather(*(router.generate(prompt, max_tokens=24) for prompt in PROMPTS))
        with pytest.raises(DeadlyRequest) as caught:
            await router.generate([1, poison], max_tokens=4)
        assert [(answer.token_ids, answer.models) for answer in await good] == EXPECTED
    assert "4 workers of model 'slm' in a row died while they ran this request at output position 0" in str(
        caught.value
    )
    assert "chaos: poisoned" in str(caught.value)


@pytest.mark.parametrize(("deadly", "good"), [(2, PROMPTS), (5, PROMPTS), (3, [])], ids=str)
async def test_no_number_of_requests_of_which_workers_die_takes_the_model_down(
    deadly: int, good: list[list[int]], tmp_path: Path
) -> None:
    poison = next(i for i in range(20, 100) if all(i not in tokens for tokens, _ in EXPECTED))
    recipe = chaos_pair(tmp_path, slm=[{"poison": poison}] * 40, restarts=2)
    async with Router(recipe) as router:
        poisoned = (router.generate([1, poison, 2 + i], max_tokens=4) for i in range(deadly))
        bad = asyncio.gather(*poisoned, return_exceptions=True)
        done = await asyncio.gather(*(router.generate(prompt, max_tokens=24) for prompt in good))
        assert [(answer.token_ids, answer.models) for answer in done] == EXPECTED[: len(good)]
        assert {type(error) for error in await bad} == {DeadlyRequest}
        answer = await router.generate(PROMPTS[0], max_tokens=24)
        assert (answer.token_ids, answer.models) == EXPECTED[0]


async def test_a_broken_model_is_given_up_if_only_one_request_asks_for_it(tmp_path: Path) -> None:
    recipe = chaos_pair(tmp_path, slm=[{"die_at": 1}] * 20, restarts=4)
    async with Router(recipe) as router:
        with pytest.raises(WorkerDied, match=r"^model 'slm' is given up: 5 of its workers died in a row"):
            await router.generate(PROMPTS[0], max_tokens=24)


async def test_good_requests_go_on_between_the_deaths_of_a_suspect(tmp_path: Path) -> None:
    """Those that come while a request is on its way to its fourth death do not wait for it."""
    poison = next(i for i in range(20, 100) if all(i not in tokens for tokens, _ in EXPECTED))
    recipe = chaos_pair(tmp_path, slm=[{"poison": poison}, {"poison": poison}, {"slow_s": 0.01}])
    order: list[str] = []

    async def ask(name: str, prompt: list[int]) -> None:
        await router.generate(prompt, max_tokens=4)
        order.append(name)

    async with Router(recipe) as router:
        assert router._system is not None
        supervisor = router._system.actors[1].supervisor
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("suspect", [1, poison]))
            for _ in range(2):
                await (await supervisor.ready()).died.wait()
            tasks.create_task(ask("other", PROMPTS[0]))
    assert order == ["other", "suspect"]


@pytest.mark.parametrize(
    ("life", "error", "said"),
    [
        (
            {"die_loading": 7},
            WorkerDied,
            r"ended with exit code 7; its last words:\n  chaos: dies while loading",
        ),
        ({"fail_loading": "no such weights"}, ModelLoadError, "^model 'llm': no such weights$"),
        ({"hang_loading": True}, WorkerDied, "after no answer within 1 s; its last words:(?s:.*) in _hang"),
    ],
    ids=["dies", "fails", "hangs"],
)
async def test_a_model_that_does_not_load_is_an_error_within_seconds(
    life: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(error, match=said):
            async with Router(chaos_pair(tmp_path, llm=[life], load_timeout=1.0)):
                pass


async def test_a_death_while_nothing_ran_is_held_against_no_request(tmp_path: Path) -> None:
    """With it, the request would have seen four deaths in a row, and be taken for their cause."""
    recipe = chaos_pair(tmp_path, slm=[{}, *[{"die_at": 1}] * 3])
    async with Router(recipe) as router:
        assert router._system is not None
        supervisor = router._system.actors[1].supervisor
        first = await supervisor.ready()
        os.kill(first.pid, signal.SIGKILL)
        await first.died.wait()
        await supervisor.ready()
        answer = await router.generate(PROMPTS[0], max_tokens=24)
        assert (answer.token_ids, answer.models) == EXPECTED[0]
        assert supervisor.restarts == 4


async def test_a_worker_that_cannot_be_replaced_at_once_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = chaos_pair(
        tmp_path,
        llm=[{"kill_at": 2}, {"die_loading": 7}, {"fail_loading": "no room"}, {"hang_loading": True}],
        load_timeout=2.0,
    )
    async with Router(recipe) as router:
        assert await answers(router) == EXPECTED
    deaths = [record.message for record in caplog.records if record.name == "tokenflow.supervisor"]
    assert [death.rpartition("; ")[2] for death in deaths] == [
        "another one is started",
        "another one is started in 0.1 s",
        "another one is started in 0.2 s",
        "another one is started in 0.4 s",
    ]
    assert "exit code 7; its last words:\n  chaos: dies while loading" in deaths[1]
    assert "model 'llm': no room" in deaths[2]
    assert "after no answer within 2 s" in deaths[3]


async def test_a_worker_that_is_stopped_while_it_loads_goes_on(tmp_path: Path) -> None:
    stopped = {"stop_loading": True}
    async with (
        asyncio.timeout(60),
        Router(chaos_pair(tmp_path, [stopped], [{"kill_at": 3}, stopped])) as router,
    ):
        assert await answers(router) == EXPECTED
        assert [status.restarts for status in router.status.models] == [0, 1]


async def test_requests_at_other_models_go_on_while_a_worker_is_replaced(tmp_path: Path) -> None:
    """The large model's second worker loads for ever: what the small one can do alone is done."""
    log = Log()
    recipe = chaos_pair(tmp_path, llm=[{"kill_at": 1}, {"hang_loading": True}], slm=[{"slow_s": 0.01}])
    async with Router(recipe, observer=log) as router:
        tasks = [asyncio.ensure_future(router.generate(prompt, max_tokens=24)) for prompt in PROMPTS]
        alone = [p for p in ([1, 2 + i] for i in range(60)) if set(expected_pair(p, 4)[1]) == {"slm"}]
        assert alone, "no request stays at the small model: the test does not test"
        await log.until(lambda: len(log.steps) > 3)
        async with asyncio.timeout(10):
            done = await router.generate_many(alone, max_tokens=4)
        assert [(answer.token_ids, answer.models) for answer in done] == [expected_pair(p, 4) for p in alone]
        assert not all(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_seeded_requests_go_on_at_the_right_position(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "frequency_penalty": 0.5}
    prompts = [(prompt, seed) for seed, prompt in enumerate(PROMPTS)]

    async def ask(router: Router) -> list[Completion]:
        return await asyncio.gather(*(router.generate(p, seed=seed, **settings) for p, seed in prompts))

    (tmp_path / "calm").mkdir()
    async with Router(chaos_pair(tmp_path / "calm")) as router:
        calm = await ask(router)
    (tmp_path / "wild").mkdir()
    wild_pair = chaos_pair(tmp_path / "wild", slm=[{"kill_at": 6}, {"die_at": 3}], llm=[{"die_at": 3}])
    async with Router(wild_pair) as router:
        wild = await ask(router)
    assert [(a.token_ids, a.models, a.text) for a in wild] == [(a.token_ids, a.models, a.text) for a in calm]
