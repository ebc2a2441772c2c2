"""Recipes with members on SGLang: the text and the trace of every algorithm are those of the naive reference.

The torch engine is held to the same reference, so what runs where makes no difference.
"""

from __future__ import annotations

import pytest

from tests.algorithms.forms import FORMS
from tests.exactness import unexcused
from tests.reference.cases import DEMO, r_stitch
from tests.reference.record import ALGORITHMS, R_STITCH, load_traces
from tokenflow.dsl.load import load_recipe
from tokenflow.router import Router

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]

PROMPTS = range(100)
TAU = 0.03


def on_sglang(*members: str) -> list[str]:
    """Overrides that run members on SGLang."""
    settings = ("engine=sglang", "device=cpu", "dtype=float32", "kv_cache=16384")
    return [f"models.{member}.{setting}" for member in members for setting in settings]


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("name", ["r2r", "citer", "co_llm", "me"])
async def test_an_algorithm_on_sglang_equals_the_naive_reference(name: str, concurrency: int) -> None:
    form = FORMS[f"{name}.yaml"]
    members = [model.name for model in load_recipe(form.recipe).models]
    async with Router(form.recipe, overrides=on_sglang(*members)) as router:
        assert not await unexcused(router, load_traces(ALGORITHMS), name, concurrency, PROMPTS)


@pytest.mark.parametrize(
    ("members", "concurrency"),
    [(("slm", "llm"), 1), (("slm", "llm"), 8), (("slm",), 8), (("llm",), 8)],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
async def test_r_stitch_equals_the_naive_reference_wherever_its_members_run(
    members: tuple[str, ...], concurrency: int
) -> None:
    recorded = load_traces(R_STITCH)
    async with Router(DEMO.parent / "demo.yaml", overrides=on_sglang(*members)) as router:
        case, params = r_stitch(TAU), {"tau": TAU}
        assert not await unexcused(router, recorded, case, concurrency, PROMPTS, params)
