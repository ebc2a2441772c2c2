"""Simulated recipes through the public API: real actors, processes and channels, no weights."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.threads import ThreadNursery
from tokenflow import cli
from tokenflow.actors import system
from tokenflow.errors import ModelLoadError, PlanError
from tokenflow.planner import PolicyTable, RoutingModel, Thresholds
from tokenflow.router import Router
from tokenflow.settings import settings

RECIPES = Path(__file__).parents[1] / "recipes"
FAST_MS = (1.0, 4.0)


def recipe(p: float = 0.35, latency_ms: tuple[float, float] = FAST_MS, **batching: Any) -> dict[str, Any]:
    small, large = latency_ms
    return {
        "name": "sim",
        "entry": "slm",
        "params": {"p": p},
        "models": {
            "slm": {"engine": "sim", "latency_ms": small, "routing": {"llm": "p"}},
            "llm": {"engine": "sim", "latency_ms": large, "routing": {"slm": 1}},
        },
        "routes": {
            "slm": [{"when": "draw < p", "to": "llm", "send": "drop_last"}],
            "llm": [{"after": 1, "to": "slm", "send": "keep"}],
        },
        "batching": batching or {"policy": "eager"},
    }


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are threads: they start at once, and need the interpreter for themselves."""
    monkeypatch.setattr(system, "Nursery", ThreadNursery)
    asleep = dataclasses.replace(settings(), poll=False)
    monkeypatch.setattr(system, "settings", lambda: asleep)


def test_a_seed_gives_the_same_response_whatever_the_batches(threads: None) -> None:
    async def responses(**batching: Any) -> list[Any]:
        async with Router(recipe(**batching)) as router:
            waiting = (router.generate([1, 2], seed=seed, max_tokens=30) for seed in range(6))
            return [(done.token_ids, done.models) for done in await asyncio.gather(*waiting)]

    eager = asyncio.run(responses(policy="eager"))
    delayed = asyncio.run(responses(policy="fixed", thresholds={"slm": 2, "llm": 4}))
    assert eager == delayed
    assert len({tuple(ids) for ids, _ in eager}) == 6
    assert {model for _, models in eager for model in models} == {"slm", "llm"}


def test_a_response_says_that_it_is_simulated_and_takes_as_long(threads: None) -> None:
    async def one() -> Any:
        async with Router(recipe(p=0.5)) as router:
            return await router.generate("hello", seed=1, max_tokens=40)

    done = asyncio.run(one())
    assert done.simulated
    assert len(done.text) == 40 and done.text.isalpha() and done.text.islower()
    small, large = FAST_MS
    steps_ms = 40 * small + done.usage.handoffs / 2 * large
    assert done.timing.latency_s >= steps_ms / 1e3


def test_a_request_may_have_a_share_of_its_own(threads: None) -> None:
    async def shares() -> list[int]:
        async with Router(recipe()) as router:
            done = [await router.generate([1], seed=3, max_tokens=30, params={"p": p}) for p in (0.0, 1.0)]
            return [one.usage.by_model["llm"] for one in done]

    assert asyncio.run(shares()) == [0, 30]


def test_recorded_responses_are_written_by_the_same_models_again(threads: None, tmp_path: Path) -> None:
    rows = [["slm", "llm", "llm", "slm"], ["slm"] * 3, ["llm", "slm", "llm"]]
    trace = tmp_path / "out.jsonl"
    trace.write_text(
        "".join(json.dumps({"tokens": [{"model": name} for name in row]}) + "\n" for row in rows)
    )
    given = recipe()
    for model in given["models"].values():
        del model["routing"]
        model["trace"] = str(trace)

    async def written() -> list[Any]:
        async with Router(given) as router:
            done = [await router.generate([1], seed=seed) for seed in range(4)]
            return [(one.models, one.finish_reason) for one in done]

    assert asyncio.run(written()) == [(row, "stop") for row in [*rows, rows[0]]]


def test_a_trace_that_does_not_fit_is_said_at_the_start(threads: None, tmp_path: Path) -> None:
    trace = tmp_path / "out.jsonl"
    trace.write_text(json.dumps({"tokens": [{"model": "slm"}, {"model": "mid"}]}) + "\n")
    given = recipe()
    del given["models"]["slm"]["routing"]
    given["models"]["slm"]["trace"] = str(trace)

    async def start() -> None:
        async with Router(given):
            pass

    with pytest.raises(ModelLoadError, match="response 0 of the trace goes from 'slm' to 'mid'"):
        asyncio.run(start())


def test_what_was_measured_is_what_was_simulated(threads: None) -> None:
    async def measured() -> RoutingModel:
        async with Router(recipe()) as router:
            with pytest.raises(PlanError, match="too few steps"):
                router.routing_model()
            await router.generate_many([[1]] * 8, concurrency=4, max_tokens=150)
            return router.routing_model()

    model = asyncio.run(measured())
    assert model.routing[0][1] == pytest.approx(0.35, abs=0.06)
    assert model.routing[1] == (1, 0)
    assert model.commits == ((1, 0), (1, 0))
    for i, latency in enumerate(FAST_MS):
        assert latency <= model.step_ms(i, 1) + model.quantum_ms


async def until(router: Router, holds: Any) -> None:
    """Keep requests going until what is asked for holds of the table of start policies."""
    assert router._system is not None
    policies = router._system.batching._policies
    tasks = [asyncio.ensure_future(_forever(router, number)) for number in range(8)]
    try:
        while policies._table is None or not holds(policies._table):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forever(router: Router, number: int) -> None:
    while True:
        await router.generate([1], max_tokens=50, seed=number)


def test_a_measured_load_replaces_a_wrong_assumption(threads: None) -> None:
    assume = {"latency_ms": {"slm": 9, "llm": 9.5}, "routing": {"slm": {"llm": 0.05}}}

    def measured(table: PolicyTable) -> bool:
        share = table.model.routing[0][1]
        return abs(share - 0.35) < 0.08 and any(entry.concurrency == 8 for entry in table.planned)

    async def run() -> None:
        async with Router(recipe(policy="auto", assume=assume)) as router:
            await until(router, lambda table: table.model.routing[0][1] == 0.05)
            await until(router, measured)

    asyncio.run(run())


def test_planned_thresholds_come_from_what_is_assumed(threads: None) -> None:
    async def run() -> Any:
        async with Router(recipe(policy="planned", latency_ms=(6.0, 27.9))) as router:
            await until(router, lambda table: any(entry.concurrency == 8 for entry in table.planned))
            assert router._system is not None
            return router._system.batching._policies.at(8, (8, 8))

    assert asyncio.run(run()) == Thresholds((1, 5))


def test_a_falling_load_is_never_left_waiting(threads: None) -> None:
    """Eight requests with a high threshold; when one is left, it goes on alone and at its own speed."""

    async def run() -> tuple[float, Any]:
        batching = {"policy": "fixed", "thresholds": {"slm": 3, "llm": 6}}
        async with Router(recipe(**batching)) as router:
            others = [asyncio.ensure_future(router.generate([1], max_tokens=20)) for _ in range(7)]
            await asyncio.gather(*others)
            began = time.monotonic()
            done = await router.generate([1], seed=5, max_tokens=100)
            return time.monotonic() - began, done

    seconds, done = asyncio.run(run())
    small, large = FAST_MS
    alone = (100 * small + done.usage.handoffs / 2 * large) / 1e3
    assert seconds < 2 * alone + 0.5


def test_the_sim_recipe_runs_as_a_user_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["run", str(RECIPES / "sim.yaml"), "hello", "--json", "--max-tokens", "8", "--seed", "1"])
        == 0
    )
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert row["simulated"] is True
    assert len(row["tokens"]) == 8
    assert "loading slm (simulated), llm (simulated)" in err
    assert "simulated: 8 tokens" in err


def test_checks_say_that_it_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(RECIPES / "sim.yaml")]) == 0
    assert capsys.readouterr().out.startswith("sim: simulated; starts at slm\n")
