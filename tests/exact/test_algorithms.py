"""Every algorithm in every form on 200 prompts, alone and in company; the demo's heads on all 1,000."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipes.demo.scores import score
from recipes.demo.table import outcome
from tests.algorithms.forms import FORMS, R_STITCH_FORMS, SAMPLED
from tests.exactness import unexcused
from tests.reference.cases import DEMO, TAUS, r_stitch
from tests.reference.record import ALGORITHMS, R_STITCH, load_traces
from tokenflow.router import Router

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("name", FORMS)
async def test_text_and_trace_equal_the_naive_reference(name: str, concurrency: int) -> None:
    recorded, form, wrong = load_traces(ALGORITHMS), FORMS[name], []
    async with Router(form.recipe, overrides=form.overrides) as router:
        for case, params in form.cases.items():
            temperature = 1.0 if case in SAMPLED else 0.0
            prompts = range(ALGORITHMS.count)
            wrong += await unexcused(router, recorded, case, concurrency, prompts, params, temperature)
    assert not wrong


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("name", R_STITCH_FORMS)
async def test_r_stitch_in_python_equals_the_naive_reference(name: str, concurrency: int) -> None:
    recorded, form, wrong = load_traces(R_STITCH), R_STITCH_FORMS[name], []
    async with Router(form.recipe, overrides=form.overrides) as router:
        for tau in TAUS:
            prompts = range(200)
            wrong += await unexcused(router, recorded, r_stitch(tau), concurrency, prompts, {"tau": tau})
    assert not wrong


ROWS = {"r2r": "R2R head", "citer": "CITER head", "co_llm": "Co-LLM,"}


@pytest.mark.parametrize("name", ROWS)
async def test_a_demo_head_reaches_the_accuracy_and_the_share_of_the_table(name: str) -> None:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (DEMO / "eval.jsonl").read_text().splitlines()]
    line = next(x for x in (DEMO / "results.md").read_text().splitlines() if x.startswith(f"| {ROWS[name]}"))
    accuracy, _, share = (float(cell) for cell in line.split("|")[2:5])
    async with Router(DEMO / f"{name}.yaml") as router:
        completions = await router.generate_many(
            [row["messages"] for row in rows], concurrency=32, max_tokens=400
        )
    reached = score([outcome(row, answer) for row, answer in zip(rows, completions, strict=True)])
    assert reached.answers == 1000
    assert reached.accuracy == pytest.approx(accuracy, abs=0.01)
    assert reached.share == pytest.approx(share, abs=0.01)
