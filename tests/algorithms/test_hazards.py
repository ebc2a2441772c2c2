"""What goes wrong in routing token by token if nobody thinks of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.algorithms.toys import EOS, toy_recipe
from tests.exactness import answers
from tests.recipes_python import handoffs
from tests.test_router import Log
from tokenflow.errors import RouteFailed
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

PADDED = 110
"""An id of the toys' logits that no tokenizer has."""


def deferral(when: str, **more: Any) -> dict[str, Any]:
    """The large model writes one token wherever ``when`` holds at the small one."""
    return {
        "routes": {
            "slm": [{"when": when, "to": "llm", "send": "drop_last"}],
            "llm": [{"after": 1, "to": "slm", "send": "keep"}],
        },
        **more,
    }


async def test_a_class_that_inherits_a_dropping_send_livelocks_with_an_error(tmp_path: Path) -> None:
    recipe = toy_recipe(
        tmp_path,
        handoffs.livelock,
        slm={"script": [[10, 12], [10, 12], [10, 0.5]]},
        llm={"script": [[11, 12]]},
    )
    async with Router(recipe) as router:
        with pytest.raises(RouteFailed) as caught:
            await router.generate([1], max_tokens=10)
        assert "recipe 'bouncing': model 'llm' hands output position 2 to 'slm'" in str(caught.value)
        # With a parameter at which nothing leaves, the same router goes on.
        assert (await router.generate([1], max_tokens=3, params={"tau": 1.0})).models == ["slm"] * 3


async def test_an_uncertain_end_of_sequence_is_dropped_and_a_certain_one_ends(tmp_path: Path) -> None:
    recipe = toy_recipe(
        tmp_path,
        deferral("confidence < 0.5"),
        slm={"script": [[EOS, 0.5], [EOS, 12]]},
        llm={"script": [[11, 12]]},
    )
    async with Router(recipe) as router:
        completion = await router.generate([1], max_tokens=9)
    assert (completion.token_ids, completion.models) == ([11, EOS], ["llm", "slm"])
    assert completion.usage.completion_tokens == 2


async def test_padded_columns_are_in_the_entropy_and_never_sampled(tmp_path: Path) -> None:
    """A padded column has nearly all of the probability."""
    peaked = [0.0] * 128
    peaked[20], peaked[PADDED] = 5.0, 20.0
    recipe = toy_recipe(
        tmp_path,
        deferral("entropy < 0.01 and confidence > 0.999 and logprob < -10"),
        slm={"script": [peaked]},
        llm={"script": [peaked]},
    )
    async with Router(recipe) as router:
        greedy = await router.generate([1], max_tokens=4)
        sampled = await router.generate([1], max_tokens=200, temperature=1.5, ignore_eos=True)
    assert greedy.token_ids == [20] * 4
    assert greedy.models == ["llm"] * 4
    assert max(sampled.token_ids) < 100


@pytest.mark.parametrize("defer_id", [50, 105])
async def test_a_deferral_column_is_a_signal_and_nothing_else(tmp_path: Path, defer_id: int) -> None:
    """Never sampled, inside the vocabulary or beyond, and outside every softmax; its raw logit scores."""
    peaked = [0.0] * 128
    peaked[20], peaked[defer_id] = 15.0, 30.0
    plain = [0.0] * 128
    plain[20], plain[defer_id] = 15.0, -3.0
    recipe = toy_recipe(
        tmp_path,
        deferral('head("defer") > 0.99 and confidence > 0.99', heads={"defer": {"kind": "co_llm"}}),
        slm={"script": [plain, peaked, plain]},
        llm={"script": [[21, 12]]},
    )
    config = tmp_path / "slm" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "defer_token_id": defer_id}))
    async with Router(recipe) as router:
        greedy = await router.generate([1], max_tokens=4)
        sampled = await router.generate([1], max_tokens=200, temperature=3.0, ignore_eos=True)
    assert greedy.token_ids == [20, 21, 20, 20]
    assert greedy.models == ["slm", "llm", "slm", "slm"]
    assert defer_id not in sampled.token_ids
    assert len(set(sampled.token_ids)) > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_path_depends_on_the_seed_and_not_on_the_batch(tmp_path: Path, temperature: float) -> None:
    draw = {"draw": {"a": 0.5, "b": 0.3, "c": 0.2}}
    options = {name: {"salt": salt, "kv_capacity": 400} for salt, name in enumerate("abc", 1)}
    recipe = toy_recipe(tmp_path, draw, **options)
    request: dict[str, Any] = {"max_tokens": 30, "temperature": temperature, "ignore_eos": True}
    async with Router(recipe) as router:
        alone = [await router.generate([1, 40, 50], seed=seed, **request) for seed in range(6)]
        crowded: dict[int, Any] = {}

        async def ask(seed: int) -> None:
            crowded[seed] = await router.generate([1, 40, 50], seed=seed, **request)

        async with anyio.create_task_group() as tasks:
            # Submitted the other way round, among others: other rows, other request ids.
            for seed in reversed(range(24)):
                tasks.start_soon(ask, seed)
    for seed, completion in enumerate(alone):
        assert crowded[seed].models == completion.models
        assert crowded[seed].token_ids == completion.token_ids
    assert len({tuple(completion.models) for completion in alone}) == 6


async def test_the_writer_of_the_first_token_is_drawn_too(tmp_path: Path) -> None:
    weights = {"a": 0.2, "b": 0.5, "c": 0.3}
    recipe = toy_recipe(tmp_path, {"draw": weights}, **{name: {"salt": 1} for name in weights})
    count = 400
    async with Router(recipe) as router:
        completions = await answers(router, {seed: [1, 40] for seed in range(count)}, 64, max_tokens=1)
    first = [completion.models[0] for completion in completions.values()]
    for name, weight in weights.items():
        spread = math.sqrt(weight * (1 - weight) / count)
        assert abs(first.count(name) / count - weight) < 5 * spread


async def test_the_choices_of_one_prompt_take_different_paths(tmp_path: Path) -> None:
    recipe = toy_recipe(tmp_path, {"draw": {"a": 1, "b": 1}}, a={"salt": 1}, b={"salt": 2})
    async with Router(recipe) as router:
        paths = {
            tuple((await router.generate([1, 40], seed=5, choice=choice, max_tokens=30)).models)
            for choice in range(4)
        }
    assert len(paths) == 4


STATEFUL = {
    "routes": {
        "slm": [{"when": "momentum(entropy, 0.6) > 0.2", "to": "llm", "send": "drop_last"}],
        "llm": [{"when": "window(entropy, 3) < 0.42", "to": "slm", "send": "keep"}],
    }
}


async def test_windows_and_momentums_survive_hand_offs_and_preemption(tmp_path: Path) -> None:
    prompts = [[1, 40, 50, 20 + i] for i in range(12)]
    log, answered = Log(), []
    for folder, capacity in (("roomy", 65536), ("narrow", 110)):
        (tmp_path / folder).mkdir()
        options = {
            name: {"salt": salt, "kv_capacity": capacity} for salt, name in enumerate(("slm", "llm"), 1)
        }
        async with Router(toy_recipe(tmp_path / folder, STATEFUL, **options), observer=log) as router:
            completions = await router.generate_many(prompts, concurrency=12, max_tokens=40, ignore_eos=True)
        answered.append([(each.token_ids, each.models, each.usage.handoffs) for each in completions])
    roomy, narrow = answered
    assert roomy == narrow
    assert all(handoffs > 2 for _, _, handoffs in roomy)
    assert any(opened.epoch for _, step, _ in log.steps for opened in step.open), "nothing was preempted"


async def test_a_route_calls_a_trained_layer_without_a_thought_of_gradients(tmp_path: Path) -> None:
    async with Router(toy_recipe(tmp_path, handoffs.learned)) as router:
        completion = await router.generate([1, 40], max_tokens=8, ignore_eos=True)
    assert completion.models == ["slm"] * 8
