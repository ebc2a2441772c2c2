"""Expressions that a route in Python reads: what they remember belongs to the request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.algorithms.toys import toy_recipe
from tests.exactness import answers
from tests.recipes_python import handoffs
from tests.test_router import Log
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

RULES: dict[str, Any] = {
    "params": {"tau": 0.42},
    "routes": {
        "slm": [
            {
                "when": 'window(entropy, 3) > tau and momentum(token % 3 == 0, 0.6) < 0.5 or at("7")',
                "to": "llm",
                "send": "drop_last",
            }
        ],
        "llm": [{"when": "window(entropy > tau, 4) < 0.6", "to": "slm", "send": "keep"}],
    },
}
PROMPTS = {seed: [1, 40, 50, 20 + seed] for seed in range(16)}


@pytest.mark.parametrize("kv_capacity", [65536, 120])
async def test_a_route_that_reads_expressions_does_what_rules_do(tmp_path: Path, kv_capacity: int) -> None:
    """Alone, in company, and where requests are preempted and rebuilt."""
    options = {
        name: {"salt": salt, "kv_capacity": kv_capacity} for salt, name in enumerate(("slm", "llm"), 1)
    }
    done = {}
    for name, recipe in (("rules", RULES), ("python", handoffs.remembering)):
        log, folder = Log(), tmp_path / name
        folder.mkdir()
        async with Router(toy_recipe(folder, recipe, **options), observer=log) as router:
            alone = await answers(router, {seed: PROMPTS[seed] for seed in (0, 5)}, 1, max_tokens=40)
            done[name] = await answers(router, PROMPTS, 16, max_tokens=40, ignore_eos=True)
        for seed, completion in alone.items():
            assert completion.models == done[name][seed].models[: len(completion.models)]
        rebuilt = any(opened.epoch for _, step, _ in log.steps for opened in step.open)
        assert rebuilt == (kv_capacity == 120)
    traces = {
        name: {seed: (c.token_ids, c.models) for seed, c in some.items()} for name, some in done.items()
    }
    assert traces["python"] == traces["rules"]
    assert sum(completion.usage.handoffs for completion in done["python"].values()) > 50
