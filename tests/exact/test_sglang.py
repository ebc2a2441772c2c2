"""Members on SGLang: 100 prompts of each of the five algorithms, alone and in company.  Needs SGLang."""

from __future__ import annotations

import pytest

from tests.algorithms.forms import FORMS
from tests.exactness import unexcused
from tests.reference.cases import DEMO, r_stitch
from tests.reference.record import ALGORITHMS, R_STITCH, load_traces
from tests.sglang.members import ALGORITHM_NAMES, TAU, on_sglang
from tokenflow.dsl.load import load_recipe
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

PROMPTS = range(100)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("name", ALGORITHM_NAMES)
async def test_an_algorithm_on_sglang_equals_the_naive_reference(name: str, concurrency: int) -> None:
    form = FORMS[f"{name}.yaml"]
    members = [model.name for model in load_recipe(form.recipe).models]
    async with Router(form.recipe, overrides=on_sglang(*members)) as router:
        assert not await unexcused(router, load_traces(ALGORITHMS), name, concurrency, PROMPTS)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("members", [("slm", "llm"), ("slm",), ("llm",)], ids="+".join)
async def test_r_stitch_equals_the_naive_reference_wherever_its_members_run(
    members: tuple[str, ...], concurrency: int
) -> None:
    recorded = load_traces(R_STITCH)
    async with Router(DEMO.parent / "demo.yaml", overrides=on_sglang(*members)) as router:
        case, params = r_stitch(TAU), {"tau": TAU}
        assert not await unexcused(router, recorded, case, concurrency, PROMPTS, params)
