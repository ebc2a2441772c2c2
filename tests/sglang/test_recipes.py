"""Recipes with members on SGLang: the text and the trace of every algorithm are those of the naive reference.

The torch engine is held to the same reference, so what runs where makes no difference.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.algorithms.forms import FORMS, SAMPLED
from tests.exactness import unexcused
from tests.reference.cases import DEMO, r_stitch
from tests.reference.record import ALGORITHMS, R_STITCH, eval_prompts, load_traces
from tests.sglang.members import ALGORITHM_NAMES, TAU, on_sglang
from tokenflow.router import Router

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

PROMPTS, CONCURRENCY = range(12), 4


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
async def test_an_algorithm_on_sglang_equals_the_naive_reference(name: str) -> None:
    """The models whose hidden states, logits or draws decide are on SGLang."""
    form = FORMS[f"{name}.yaml"]
    recorded = load_traces(ALGORITHMS)
    async with Router(form.recipe, overrides=on_sglang("slm")) as router:
        for case, params in form.cases.items():
            temperature = 1.0 if case in SAMPLED else 0.0
            assert not await unexcused(router, recorded, case, CONCURRENCY, PROMPTS, params, temperature)


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


async def test_seeds_penalties_and_log_probabilities_mean_what_they_mean_on_torch() -> None:
    request: dict[str, Any] = {
        "concurrency": 4,
        "max_tokens": 40,
        "temperature": 0.9,
        "top_p": 0.95,
        "min_p": 0.01,
        "seed": 11,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {20: 1.5},
        "top_logprobs": 3,
    }
    written = []
    for overrides in ([], on_sglang("slm", "llm")):
        async with Router(DEMO.parent / "demo.yaml", overrides=overrides) as router:
            written.append(await router.generate_many(eval_prompts(200)[:6], **request))
    for there, here in zip(*written, strict=True):
        assert (there.token_ids, there.models) == (here.token_ids, here.models)
        for one, other in zip(there.tokens, here.tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [best.id for best in one.top_logprobs] == [best.id for best in other.top_logprobs]
