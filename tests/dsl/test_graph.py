"""Drawings and summaries of recipes, to the last character."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.dsl.recipes import CHECKED, GATED, MIXED, PAIR
from tokenflow.dsl.describe import describe
from tokenflow.dsl.graph import mermaid, picture
from tokenflow.dsl.ir import PythonIR, RecipeIR
from tokenflow.dsl.load import load_recipe


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> RecipeIR:
    Path("recipe.yaml").write_text(text)
    return load_recipe("recipe.yaml", overrides)


def scripted() -> RecipeIR:
    """A pair whose first model has functions, and whose second has a class."""
    python = {
        "slm": PythonIR("/somewhere/script.py", route="uncertain", send="without_last"),
        "llm": PythonIR("/somewhere/script.py", router="Large", peer="slm"),
    }
    return replace(load(PAIR), routes={}, python=python)


def test_a_picture_has_a_box_per_model_and_an_arrow_per_rule() -> None:
    assert picture(load(PAIR)).splitlines() == [
        "pair: starts at slm",
        "  │",
        "┌─▼─ 1 slm ──────────────────────────────┐",
        "│ owner/small (torch, auto, device auto) │",
        "└─┬──────────────────────────────────────┘",
        "  ├╌ entropy > tau ╌╌▷ llm",
        "  └─ otherwise stays",
        "",
        "┌─── 2 llm ──────────────────────────────────┐",
        "│ owner/large (torch, bfloat16, device auto) │",
        "└─┬──────────────────────────────────────────┘",
        "  ├─ entropy <= tau ──▶ slm",
        "  └─ otherwise stays",
        "",
        "──▶ the sampled token is kept, and sent along",
        "╌╌▷ the sampled token is dropped: the next model writes its position",
    ]


def test_a_picture_of_an_ensemble_begins_at_every_model_and_numbers_the_rules() -> None:
    lines = picture(load(MIXED)).splitlines()
    assert lines[0] == "mixed: draws who writes each token, by weights slm 0.5, mid 0.3, llm 0.2"
    assert lines[lines.index("┌─▼─ 2 mid ───────────────────────────────┐") - 1] == "  ┊"
    assert lines[-10:] == [
        "  ┊",
        "┌─▼─ 3 llm ────────────────────────────────────────┐",
        "│ owner/large (torch, auto, device auto)           │",
        "│ budget: at most 25% of the tokens and 100 tokens │",
        "└─┬────────────────────────────────────────────────┘",
        "  ├─ 1. draw < 0.5 ──────────────────▶ slm",
        "  ├─ 2. 0.5 <= draw and draw < 0.8 ──▶ mid",
        "  └─ otherwise stays",
        "",
        "──▶ the sampled token is kept, and sent along",
    ]


def test_a_picture_tells_of_heads_checks_and_python() -> None:
    assert "│ head gate: r2r for slm, owner/repo/sub/router.pt, threshold 0.4 │" in picture(load(GATED))
    assert "│ checks up to 8 tentative tokens        │" in picture(load(CHECKED))
    assert (
        "  ├─ run_length >= 4 ─────▶ llm\n  ├─ 8 tentative tokens ──▶ llm\n  └─ otherwise stays"
        in picture(load(CHECKED))
    )
    assert '  m1 -->|"8 tentative tokens<br/>keep"| m2' in mermaid(load(CHECKED)).splitlines()
    assert picture(scripted()).splitlines()[1:] == [
        "  │",
        "┌─▼─ 1 slm ───────────────────────────────────────┐",
        "│ owner/small (torch, auto, device auto)          │",
        "│ route uncertain, send without_last in script.py │",
        "└─┬───────────────────────────────────────────────┘",
        "  └─ Python decides: stays, or goes to any model",
        "",
        "┌─── 2 llm ──────────────────────────────────┐",
        "│ owner/large (torch, bfloat16, device auto) │",
        "│ class Large in script.py                   │",
        "└─┬──────────────────────────────────────────┘",
        "  └─ Python decides: stays, or goes to any model",
    ]


def test_a_picture_of_one_model_has_no_arrows() -> None:
    recipe = load("name: one\nentry: a\nmodels: {a: o/n}\n")
    assert picture(recipe).splitlines() == [
        "one: starts at a",
        "  │",
        "┌─▼─ 1 a ────────────────────────────┐",
        "│ o/n (torch, auto, device auto)     │",
        "└─┬──────────────────────────────────┘",
        "  └─ always stays",
    ]


def test_a_mermaid_chart_has_dotted_arrows_where_tokens_are_dropped() -> None:
    assert mermaid(load(PAIR)).splitlines() == [
        "flowchart LR",
        "  prompt([prompt])",
        '  m1["1 slm<br/>owner/small (torch, auto, device auto)"]',
        '  m2["2 llm<br/>owner/large (torch, bfloat16, device auto)"]',
        "  prompt --> m1",
        '  m1 -.->|"entropy #62; tau<br/>drop_last"| m2',
        '  m2 -->|"entropy #60;= tau<br/>keep"| m1',
    ]


def test_a_mermaid_chart_escapes_what_labels_cannot_hold() -> None:
    lines = mermaid(load(GATED)).splitlines()
    label = "head(#34;defer#34;) #60; tau and run_length #62;= 3 and at(#34;#92;n#92;n#34;)<br/>keep"
    assert lines[-1] == f'  m2 -->|"{label}"| m1'
    assert lines[-2] == '  m1 -.->|"head(#34;gate#34;) #62;= threshold(#34;gate#34;)<br/>drop_last"| m2'


def test_a_mermaid_chart_of_an_ensemble_begins_at_every_model() -> None:
    lines = mermaid(load(MIXED)).splitlines()
    assert lines[5:8] == ["  prompt --> m1", "  prompt --> m2", "  prompt --> m3"]
    assert lines[8] == '  m1 -->|"1. 0.5 #60;= draw and draw #60; 0.8<br/>keep"| m2'


def test_the_summary_tells_of_everything_that_a_recipe_can_have() -> None:
    assert describe(load(GATED)).splitlines()[5:11] == [
        "heads:",
        "  gate: r2r for slm, owner/repo/sub/router.pt, threshold 0.4",
        "  defer: co_llm for llm, in the model's checkpoint, stored threshold",
        "routes:",
        '  slm  if head("gate") >= threshold("gate"): to llm, drop_last',
        r'  llm  if head("defer") < tau and run_length >= 3 and at("\n\n"): to slm, keep',
    ]
    mixed = describe(load(MIXED, "draw.llm=w * 2")).splitlines()
    assert mixed[0] == "mixed: draws who writes each token, by weights slm 0.5, mid 0.3, llm w * 2"
    assert "  mid  if draw < 0.5 / (0.5 + 0.3 + w * 2): to slm, keep" in mixed
    assert mixed[-2] == "budgets: llm at most 25% of the tokens and 100 tokens"
    assert describe(load(CHECKED)).splitlines()[-2] == "rollback: up to 8 tentative tokens, checked by llm"
    by_step = load(CHECKED, r'rollback_to="\n\n"')
    expected = r'rollback: up to 8 tentative tokens, the last step by at("\n\n"), checked by llm'
    assert describe(by_step).splitlines()[-2] == expected
    assert describe(scripted()).splitlines()[5:8] == [
        "routes:",
        "  slm  route uncertain, send without_last in script.py",
        "  llm  class Large in script.py",
    ]
