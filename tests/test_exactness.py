"""The exactness matrix in small: some prompts of each setting in every test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness import unexcused
from tests.reference.cases import DEMO, TAUS, r_stitch
from tests.reference.record import Recorded, load_traces
from tests.reference.reference import ReferenceModels, compare
from tests.reference.rules import Alone
from tokenflow.router import Router

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return load_traces()


@pytest.mark.parametrize(
    ("slm", "llm", "concurrency", "count"), [(1, 1, 1, 8), (1, 3, 4, 24), (2, 4, 16, 48), (1, 1, 16, 48)]
)
async def test_answers_and_traces_equal_the_naive_reference(
    recorded: Recorded, slm: int, llm: int, concurrency: int, count: int
) -> None:
    overrides = [f"batching.thresholds.slm={slm}", f"batching.thresholds.llm={llm}"]
    wrong = []
    async with Router("recipes/demo.yaml", overrides=overrides) as router:
        for tau in TAUS:
            wrong += await unexcused(router, recorded, r_stitch(tau), concurrency, range(count), {"tau": tau})
    assert not wrong


@pytest.mark.parametrize("folder", ["small", "mid"])
async def test_a_recipe_of_one_model_equals_greedy_decoding_with_transformers(
    recorded: Recorded, folder: str
) -> None:
    path = DEMO / folder
    recipe = {"name": "alone", "entry": "m", "models": {"m": {"path": str(path), "dtype": "float32"}}}
    prompts = recorded.prompts[:16]
    async with Router(recipe) as router:
        answers = await router.generate_many(prompts, concurrency=8, max_tokens=200)
    reference = ReferenceModels.load({"m": path})
    for prompt, answer in zip(prompts, answers, strict=True):
        assert compare(reference.run(Alone("m"), prompt, 200), answer.token_ids, answer.models) is None


@pytest.mark.parametrize("tau", [0.01, 0.1])
async def test_with_the_same_weights_on_both_sides_any_tau_gives_the_text_of_one(
    recorded: Recorded, tau: float
) -> None:
    large: Path = DEMO / "large"
    async with Router("recipes/demo.yaml", overrides=[f"models.slm.path={large}"]) as router:
        answers = await router.generate_many(
            recorded.prompts[:40], concurrency=8, max_tokens=recorded.max_tokens, params={"tau": tau}
        )
    assert any(answer.usage.handoffs for answer in answers)
    # At tau -1 the large model writes every token but for a first one that it regenerates.
    expected = [recorded.traces[r_stitch(-1.0), index].tokens for index in range(len(answers))]
    assert [tuple(answer.token_ids) for answer in answers] == expected
