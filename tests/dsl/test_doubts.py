"""What is no error, but hardly meant: recipes that load, with warnings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.dsl.recipes import CHECKED, GATED, MIXED, PAIR
from tokenflow.dsl.doubts import truth
from tokenflow.dsl.expr import parse_condition
from tokenflow.dsl.load import load_recipe

TRIO = """\
name: trio
entry: slm
models: {slm: owner/small, mid: owner/mid, llm: owner/large}
routes:
  slm: [SLM]
  mid: [MID]
  llm: [LLM]
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def warnings(text: str) -> list[str]:
    Path("r.yaml").write_text(text)
    return [str(warning) for warning in load_recipe("r.yaml").notes.warnings]


def trio(slm: str, mid: str, llm: str, more: str = "") -> str:
    return TRIO.replace("SLM", slm).replace("MID", mid).replace("LLM", llm) + more


def rule(when: str, to: str, send: str = "keep") -> str:
    return f"{{when: {when}, to: {to}, send: {send}}}"


@pytest.mark.parametrize("text", [PAIR, GATED, MIXED, CHECKED])
def test_recipes_that_are_meant_so_have_no_warnings(text: str) -> None:
    assert warnings(text) == []


def test_recipes_of_this_project_have_no_warnings() -> None:
    folder = Path(__file__).parents[2] / "recipes"
    files = [*folder.glob("*.yaml"), *folder.glob("demo/*.yaml"), *folder.glob("*.py")]
    assert len(files) > 20
    for file in files:
        assert load_recipe(file).notes.warnings == (), file


@pytest.mark.parametrize(
    "always", ["true", "position >= 0", "entropy <= 1 or margin > 0.5", "not run_length < 1"]
)
def test_a_rule_after_one_that_always_fires_is_told_to_be_idle(always: str) -> None:
    rules = f"{rule(always, 'llm')}, {rule('entropy > 0.5', 'mid')}, {rule('margin < 0.1', 'llm')}"
    why = "never fires: rule 1 of slm always fires before it"
    first = len(f"  slm: [{rule(always, 'llm')}, ") + 1
    second = first + len(f"{rule('entropy > 0.5', 'mid')}, ")
    assert warnings(trio(rules, rule("true", "llm"), rule("entropy < 0.1", "slm"))) == [
        f"r.yaml:5:{first}: warning: routes.slm[1]: {why}",
        f"r.yaml:5:{second}: warning: routes.slm[2]: {why}",
    ]


@pytest.mark.parametrize(
    "never", ["false", "entropy > 1", "position < 0", "run_length <= 0", "draw < 0", "-1 > 2"]
)
def test_a_condition_that_never_holds_is_told(never: str) -> None:
    text = trio(
        f"{rule(never, 'mid')}, {rule('entropy > 0.5', 'mid')}", rule("true", "llm"), rule("true", "slm")
    )
    assert warnings(text) == ["r.yaml:5:9: warning: routes.slm[0]: never fires: its condition never holds"]


def test_the_same_condition_twice_is_told_whatever_it_leads_to() -> None:
    rules = f"{rule('entropy>0.5', 'llm')}, {rule('margin < 0.1', 'mid')}"
    rules += f", {rule('entropy > 0.5', 'mid', 'drop_last')}"
    (warning,) = warnings(trio(rules, rule("true", "llm"), rule("true", "slm")))
    assert warning.endswith(
        "routes.slm[2]: never fires: rule 1 of slm has the same condition, and comes first"
    )


def test_models_that_always_drop_and_hand_over_in_a_circle_are_told_once() -> None:
    drop = "drop_last"
    pair = trio(rule("entropy > 0.5", "mid"), rule("true", "llm", drop), rule("position >= 0", "mid", drop))
    assert warnings(pair) == [
        "r.yaml:6:8: warning: routes.mid: requests bounce for ever from mid to llm to mid: each drops its "
        "token, so nothing is ever written"
    ]
    circle = trio(rule("true", "mid", drop), rule("true", "llm", drop), rule("true", "slm", drop))
    (warning,) = warnings(circle)
    assert "from slm to mid to llm to slm" in warning


@pytest.mark.parametrize(
    ("slm", "llm", "more"),
    [
        (rule("true", "llm", "drop_last"), rule("true", "slm"), ""),
        (rule("entropy > 0.5", "llm", "drop_last"), rule("true", "slm", "drop_last"), ""),
        (
            rule("true", "llm", "drop_last"),
            rule("true", "slm", "drop_last"),
            "budgets: {llm: {max_tokens: 0}}",
        ),
        (
            f"{rule('margin < 0.5', 'mid')}, {rule('true', 'llm', 'drop_last')}",
            rule("true", "slm", "drop_last"),
            "",
        ),
    ],
)
def test_models_that_may_write_something_in_between_are_not(slm: str, llm: str, more: str) -> None:
    assert warnings(trio(f"{slm}, {rule('false', 'mid')}", rule("margin > 0.5", "llm"), llm, more))[1:] == []


@pytest.mark.parametrize(("after", "idle"), [(7, False), (8, False), (9, True)])
def test_a_draft_longer_than_the_window_is_told(after: int, idle: bool) -> None:
    found = warnings(CHECKED.replace("after: 4", f"after: {after}"))
    told = "routes.slm[0]: never fires: llm checks before it, since at most 8 tokens may be tentative"
    assert found == ([f"r.yaml:8:9: warning: {told}"] if idle else [])
    assert warnings(CHECKED.replace("after: 4", "after: 9") + "\nbudgets: {llm: {max_tokens: 3}}") == []


def test_what_is_said_to_hold_always_or_never_does_so_for_all_values() -> None:
    numbers = random.Random(1)
    sides = ["entropy", "margin", "position", "run_length", "0", "1", "-1", "0.5", "-entropy"]
    for _ in range(400):
        comparison = numbers.choice(["<", "<=", ">", ">=", "==", "!="])
        text = f"{numbers.choice(sides)} {comparison} {numbers.choice(sides)}"
        said = truth(parse_condition(text))
        for _ in range(20):
            values = {"entropy": numbers.choice([0.0, 0.3, 1.0]), "margin": numbers.choice([0.0, 0.7, 1.0])}
            values |= {"position": numbers.choice([0, 3]), "run_length": numbers.choice([1, 9])}
            holds = eval(text, {"__builtins__": {}}, values)
            assert said is None or said is holds, (text, values)
