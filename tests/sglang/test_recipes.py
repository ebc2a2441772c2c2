"""Recipes with members on SGLang: the text and the trace of every algorithm are those of the naive reference.

The torch engine is held to the same reference, so what runs where makes no difference.
"""

from __future__ import annotations

import pytest

from tests.algorithms.forms import FORMS
from tests.exactness import unexcused
from tests.reference.cases import DEMO, r_stitch
from tests.reference.record import ALGORITHMS, R_STITCH, load_traces
from tests.sglang.members import ALGORITHM_NAMES, TAU, on_sglang
from tokenflow.router import Router

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

PROMPTS, CONCURRENCY = range(12), 4


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
async def test_an_algorithm_on_sglang_equals_the_naive_reference(name: str) -> None:
    """The models whose hidden states, logits or draws decide are on SGLang."""
    form = FORMS[f"{name}.yaml"]
    async with Router(form.recipe, overrides=on_sglang("slm")) as router:
        assert not await unexcused(router, load_traces(ALGORITHMS), name, CONCURRENCY, PROMPTS)


@pytest.mark.parametrize("members", [("slm", "llm"), ("llm",)], ids="+".join)
async def test_r_stitch_equals_the_naive_reference_wherever_its_members_run(members: tuple[str, ...]) -> None:
    recorded = load_traces(R_STITCH)
    async with Router(DEMO.parent / "demo.yaml", overrides=on_sglang(*members)) as router:
        case, params = r_stitch(TAU), {"tau": TAU}
        assert not await unexcused(router, recorded, case, CONCURRENCY, PROMPTS, params)


async def test_tokens_are_checked_on_sglang_as_anywhere() -> None:
    """Speculative decoding asks for the logits of several positions, and takes tokens back."""
    form = FORMS["speculative.yaml"]
    async with Router(form.recipe, overrides=on_sglang("llm")) as router:
        recorded = load_traces(ALGORITHMS)
        assert not await unexcused(router, recorded, "speculative", CONCURRENCY, PROMPTS)
