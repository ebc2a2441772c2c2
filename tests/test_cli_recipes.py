"""Commands that need no models: check, graph and schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dsl.recipes import GATED, PAIR
from tokenflow.cli import main
from tokenflow.dsl.graph import mermaid, picture
from tokenflow.dsl.ir import to_json
from tokenflow.dsl.json_schema import recipe_schema
from tokenflow.dsl.load import load_recipe


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def good() -> str:
    Path("good.yaml").write_text(GATED)
    return "good.yaml"


@pytest.fixture
def wrong() -> str:
    Path("wrong.yaml").write_text(PAIR.replace("to: llm", "to: lm").replace("dtype: bfloat16", "kv_cache: 0"))
    return "wrong.yaml"


def test_check_prints_the_compiled_recipe_as_json(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", good, "--ir", "--set", "params.tau=0.25"]) == 0
    printed = capsys.readouterr()
    assert printed.out == to_json(load_recipe(good, ["params.tau=0.25"])) + "\n"
    assert json.loads(printed.out)["params"] == {"tau": 0.25}
    assert printed.err == ""


def test_check_prints_problems_as_json(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", wrong, "--json", "--set", "params.tau=x"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == [
        {
            "file": "wrong.yaml",
            "line": 6,
            "column": 38,
            "path": "models.llm.kv_cache",
            "message": "must be at least 1, got 0",
            "severity": "error",
        },
        {
            "file": "wrong.yaml",
            "line": 9,
            "column": 33,
            "path": "routes.slm[0].to",
            "message": 'unknown model "lm" (did you mean "llm"?)',
            "severity": "error",
        },
        {
            "file": "--set params.tau=x",
            "line": 0,
            "column": 0,
            "path": "params.tau",
            "message": 'expected a number, got "x"',
            "severity": "error",
        },
    ]
    assert printed.err == ""


def test_a_good_recipe_has_an_empty_list_of_problems(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", good, "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_a_file_that_is_not_there_is_a_problem_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere.yaml", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)
    assert (problem["file"], problem["message"]) == ("nowhere.yaml", "no such file")


@pytest.mark.parametrize("command", [["check"], ["check", "--ir"], ["graph"], ["graph", "--mermaid"]])
def test_a_wrong_recipe_is_told_on_stderr(
    wrong: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, wrong]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1] == "2 problems"


def test_check_prints_either_the_recipe_or_the_problems(
    good: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", good, "--ir", "--json"])
    assert left.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_graph_draws_for_the_terminal_or_as_mermaid(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", good]) == 0
    assert capsys.readouterr().out == picture(load_recipe(good)) + "\n"
    assert main(["graph", good, "--mermaid", "--set", "heads.gate.threshold=0.7"]) == 0
    assert capsys.readouterr().out == mermaid(load_recipe(good, ["heads.gate.threshold=0.7"])) + "\n"


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == recipe_schema()
