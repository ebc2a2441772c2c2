"""Recipes whose models are simulated, and what recipes assume before anything is measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tokenflow.dsl.assume import assumed_model, destinations, unknown
from tokenflow.dsl.describe import describe
from tokenflow.dsl.load import load_recipe
from tokenflow.errors import PlanError, RecipeError
from tokenflow.wire.messages import Destination

SIM = """\
name: sim
entry: slm
params: {p: 0.35}
models:
  slm: {engine: sim, latency_ms: 6.0, routing: {llm: p}}
  llm: {engine: sim, latency_ms: {1: 27.9, 16: 30}, routing: {slm: 1}}
routes:
  slm: [{when: draw < p, to: llm, send: drop_last}]
  llm: [{after: 1, to: slm, send: keep}]
"""
REAL = SIM.replace("engine: sim, latency_ms: 6.0, routing: {llm: p}", "path: o/small").replace(
    "engine: sim, latency_ms: {1: 27.9, 16: 30}, routing: {slm: 1}", "path: o/large"
)


def problems(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "sim.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert all(problem.line for problem in caught.value.problems)
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


def load(tmp_path: Path, text: str, *overrides: str) -> Any:
    file = tmp_path / "sim.yaml"
    file.write_text(text)
    return load_recipe(file, overrides)


def test_a_simulated_recipe_needs_no_paths_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    recipe = load(tmp_path, SIM)
    assert recipe.simulated == ("slm", "llm")
    assert recipe.model("llm").config.latency_ms == ((1, 27.9), (16, 30.0))
    assert describe(recipe).splitlines()[:5] == [
        "sim: simulated; starts at slm",
        "params: p = 0.35",
        "models:",
        "  1 slm  simulated: a step takes 6 ms; p of them to llm",
        "  2 llm  simulated: a step takes 27.9 ms at batch 1, 30 ms at batch 16; 100% of them to slm",
    ]


def test_any_recipe_is_simulated_from_the_command_line(tmp_path: Path) -> None:
    changes = [
        "models.slm.engine=sim", "models.slm.latency_ms=6", "models.slm.routing.llm=0.2",
        "models.llm.engine=sim", "models.llm.latency_ms={1: 20, 8: 25}", "models.llm.routing={slm: 1}",
    ]  # fmt: skip
    recipe = load(tmp_path, REAL, *changes)
    assert recipe.simulated == ("slm", "llm")
    assert recipe.model("slm").config.routing == {"llm": 0.2}


def test_where_simulated_requests_go_is_told_with_rule_share_and_send(tmp_path: Path) -> None:
    recipe = load(tmp_path, SIM)
    assert destinations(recipe, "slm") == (Destination(2, "llm", 0.0, 0, 0, False),)
    assert destinations(recipe, "llm") == (Destination(1, "slm", 1.0, -1, 0, True),)


@pytest.mark.parametrize(
    ("change", "to", "lines"),
    [
        (
            "latency_ms: 6.0, ",
            "",
            ['models.slm: missing key "latency_ms" (how long a simulated step takes, in ms)'],
        ),
        (
            "latency_ms: 6.0",
            "latency_ms: 0",
            ["models.slm.latency_ms: a step takes more than 0 ms and at most an hour; got 0"],
        ),
        (
            "latency_ms: 6.0",
            "latency_ms: {}",
            [
                "models.slm.latency_ms: expected milliseconds, or a table of them by batch size, as in "
                "{1: 6.0, 16: 7.5}; got a mapping"
            ],
        ),
        (
            "latency_ms: 6.0",
            "latency_ms: {zero: 6}",
            ["models.slm.latency_ms: batch sizes are whole numbers of at least 1; got a mapping"],
        ),
        (
            ", routing: {llm: p}",
            "",
            [
                'models.slm: missing key "routing": a simulated model has no signals for its rules; say '
                "after what share of its steps the request goes to each model, as in routing: {llm: 0.35}"
            ],
        ),
        (
            "{llm: p}",
            "{llm: 1.5}",
            [
                "models.slm.routing.llm: expected a share of steps, from 0 to 1, or the name of a param; "
                "got 1.5",
                "models.slm.routing: the shares sum to 1.5, more than 1",
            ],
        ),
        (
            "{llm: p}",
            "{llm: q}",
            [
                'models.slm.routing.llm: expected a number or the name of a param, got "q" '
                '(params: p)'
            ],
        ),
        (
            "{p: 0.35}",
            "{p: 2}",
            [
                "models.slm.routing.llm: expected a share from 0 to 1, but p is 2",
                "models.slm.routing: the shares sum to 2, more than 1",
            ],
        ),
        (
            "{llm: p}",
            "{lm: 0.1, slm: 0.1}",
            [
                'models.slm.routing.lm: unknown model "lm" (did you mean "llm"?)',
                "models.slm.routing.slm: what is left of 1 stays: give only the shares that go to other "
                "models",
            ],
        ),
        (
            "engine: sim, latency_ms: 6.0",
            "path: o/small, latency_ms: 6.0",
            [
                'models.slm.latency_ms: for "engine: sim" only; what other models are planned with is '
                "batching.assume",
                'models.slm.routing: for "engine: sim" only; what other models are planned with is '
                "batching.assume",
            ],
        ),
        (
            "routing: {llm: p}",
            "routing: {llm: p}, trace: gone.jsonl",
            [
                "models.slm.routing: the trace says where requests go: remove one of the two",
                'models.slm.trace: no such file: "gone.jsonl"',
            ],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, change: str, to: str, lines: list[str]) -> None:
    assert change in SIM
    found = problems(tmp_path, SIM.replace(change, to))
    assert sorted(found) == sorted(lines)


def test_a_model_that_is_not_simulated_needs_a_path(tmp_path: Path) -> None:
    text = REAL.replace("{path: o/small}", "{dtype: float32}")
    assert problems(tmp_path, text) == ['models.slm: missing key "path"']


def test_a_share_for_a_model_that_no_rule_leads_to_is_refused(tmp_path: Path) -> None:
    text = SIM.replace("  slm: [{when: draw < p, to: llm, send: drop_last}]\n", "")
    assert (
        "models.slm.routing.llm: no rule of slm leads there: add one, whose send says what becomes of "
        "the token"
    ) in problems(tmp_path, text)


def test_a_simulated_model_verifies_nothing(tmp_path: Path) -> None:
    text = SIM.replace("routing: {slm: 1}", "routing: {slm: 1}, verify: true") + "rollback: 4\n"
    assert problems(tmp_path, text) == [
        "models.llm.verify: a simulated model has no choice of its own to compare tokens with: use "
        "another engine"
    ]


def test_a_simulated_recipe_is_planned_with_what_it_simulates(tmp_path: Path) -> None:
    model = assumed_model(load(tmp_path, SIM))
    assert model.routing == ((0.65, 0.35), (1, 0))
    assert model.commits == ((1, 0), (1, 1))
    assert [model.step_ms(1, batch) for batch in (1, 16)] == pytest.approx([27.9, 30.0])
    assert assumed_model(load(tmp_path, SIM), {"p": 0.5}).routing[0] == (0.5, 0.5)


def test_steps_of_any_length_can_be_planned_with(tmp_path: Path) -> None:
    model = assumed_model(load(tmp_path, SIM + "batching: {assume: {latency_ms: {slm: 0.04}}}\n"))
    assert model.step_ms(0, 1) == pytest.approx(0.04)
    assert model.step_ms(1, 1) == pytest.approx(assumed_model(load(tmp_path, SIM)).step_ms(1, 1))


def test_what_is_assumed_takes_the_place_of_what_is_simulated(tmp_path: Path) -> None:
    assume = "{latency_ms: {slm: 12}, routing: {slm: {llm: 0.1}}, commits: {slm: {llm: 0.5}}}"
    model = assumed_model(load(tmp_path, SIM + f"batching: {{policy: planned, assume: {assume}}}\n"))
    assert model.routing == ((0.9, 0.1), (1, 0))
    assert model.commits[0] == (1, 0.5)
    assert model.step_ms(0, 4) == pytest.approx(12)


def test_an_ensemble_is_planned_with_its_weights(tmp_path: Path) -> None:
    text = """
name: mixed
models: {a: {engine: sim, latency_ms: 5}, b: {engine: sim, latency_ms: 9}, c: {engine: sim, latency_ms: 20}}
draw: {a: 0.5, b: 0.3, c: 0.2}
"""
    recipe = load(tmp_path, text)
    assert [round(p, 6) for p in assumed_model(recipe).routing[1]] == [0.5, 0.3, 0.2]
    assert [(to.name, to.share) for to in destinations(recipe, "b")] == [("a", 0.5), ("c", 0.2)]


def test_what_a_recipe_does_not_say_is_asked_for(tmp_path: Path) -> None:
    recipe = load(tmp_path, REAL)
    assert unknown(recipe) == [
        "how long a step of slm takes", "how long a step of llm takes",
        "where slm leads", "where llm leads",
    ]  # fmt: skip
    with pytest.raises(PlanError, match="does not say how long a step of slm takes or"):
        assumed_model(recipe)


def test_a_plan_that_nothing_is_known_for_is_refused(tmp_path: Path) -> None:
    found = problems(tmp_path, REAL + "batching: {policy: planned, assume: {latency_ms: {slm: 6}}}\n")
    assert [
        re.search(r"batching.assume.(\w+) says nothing of \"(\w+)\"", line).groups() for line in found
    ] == [
        ("routing", "slm"),
        ("latency_ms", "llm"),
        ("routing", "llm"),
    ]


@pytest.mark.parametrize("policy", ["auto", "planned", "lookahead", "eager"])
def test_thresholds_are_refused_where_no_policy_reads_them(tmp_path: Path, policy: str) -> None:
    [line] = problems(tmp_path, SIM + f"batching: {{policy: {policy}, thresholds: {{llm: 2}}}}\n")
    assert 'thresholds need "policy: fixed"' in line


def test_names_in_assumptions_are_checked(tmp_path: Path) -> None:
    assume = "{latency_ms: {sml: 1}, routing: {slm: {lm: 0.1}}, commits: {llm: {sl: 1}}}"
    found = problems(tmp_path, SIM + f"batching: {{assume: {assume}}}\n")
    assert [line.split(": ")[1] for line in found] == [
        'unknown model "sml" (did you mean "slm"?)',
        'unknown model "lm" (did you mean "llm"?)',
        'unknown model "sl" (did you mean "slm"?)',
    ]
