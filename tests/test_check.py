"""``tokenflow check`` on recipes whose models are here: what is found without their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.recipes import DEMO
from tokenflow.cli import main

RECIPE = """\
name: pair
entry: slm
models:
  slm: {path: ./small}
  llm: {path: ./large}
heads:
  defer: {kind: co_llm}
routes:
  slm: [{when: head("defer") > threshold("defer"), to: llm, send: drop_last}]
  llm: [{at: "\\n", to: slm, send: keep}]
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories of two models without weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("small", "large"):
        Path(name).mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
            shutil.copy(DEMO / name / file, name)
    config = json.loads(Path("small/config.json").read_text())
    Path("small/config.json").write_text(json.dumps({**config, "defer_threshold": 0.5}))


def errors(capsys: pytest.CaptureFixture[str], text: str = RECIPE) -> list[str]:
    Path("r.yaml").write_text(text)
    code = main(["check", "r.yaml"])
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert code == (2 if lines else 0)
    return lines[:-1]


def test_models_without_weights_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors(capsys) == []


def test_a_directory_that_is_not_there_is_told_with_line_and_guess(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = RECIPE.replace("./large", "./largo").replace(
        "co_llm}", f"citer, path: {tmp_path}/mlp.pth, threshold: 1}}"
    )
    assert errors(capsys, text) == [
        f'r.yaml:5:15: error: models.llm.path: there is no {tmp_path}/largo (did you mean "large"?)',
        f"r.yaml:7:30: error: heads.defer.path: there is no {tmp_path}/mlp.pth",
    ]


def test_a_directory_without_a_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("large/config.json").unlink()
    (line,) = errors(capsys)
    assert line.startswith("r.yaml:5:15: error: models.llm.path: ")
    assert line.endswith("has no config.json, so it is not a model in Hugging Face layout")


def test_a_text_that_no_ids_spell_is_told_at_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors(capsys, RECIPE.replace("\\n", "é")) == [
        'r.yaml:10:9: error: routes.llm[0]: no token ids spell "é": the output can never reach it'
    ]


def test_models_of_two_vocabularies_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Path("large/tokenizer.json").read_text()
    Path("large/tokenizer.json").write_text(tokenizer.replace('"7"', '"8 "', 1))
    (line,) = errors(capsys)
    assert line.startswith("r.yaml:4:3: error: models: models slm and llm do not share one vocabulary: id ")


def test_a_threshold_that_the_model_does_not_store_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEMO / "small" / "config.json", "small")
    assert errors(capsys) == [
        "r.yaml:7:3: error: heads.defer: no threshold is stored with the model (defer_threshold of "
        "config.json): give one here"
    ]
    assert errors(capsys, RECIPE.replace("co_llm}", "co_llm, threshold: 0.5}")) == []


@pytest.mark.parametrize("stored", ["0.5", True, float("inf")])
def test_a_stored_threshold_that_is_no_number_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stored: object
) -> None:
    config = json.loads(Path("small/config.json").read_text())
    Path("small/config.json").write_text(json.dumps({**config, "defer_threshold": stored}))
    assert errors(capsys) == [
        f"r.yaml:7:3: error: heads.defer: defer_threshold of {tmp_path}/small/config.json must be a finite "
        f"number, got {stored!r}: give one here"
    ]


def test_models_on_the_hub_are_not_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow.hub._fetch", lambda *_: pytest.fail("fetched"))
    assert errors(capsys, RECIPE.replace("./large", "owner/large").replace("./small", "owner/small")) == []


def test_warnings_are_told_and_change_no_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = RECIPE.replace('{at: "\\n"', "{when: true, to: slm, send: keep}, {after: 3")
    Path("r.yaml").write_text(text)
    assert main(["check", "r.yaml"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("pair: starts at slm")
    message = "never fires: rule 1 of llm always fires before it"
    assert printed.err == f"r.yaml:10:44: warning: routes.llm[1]: {message}\n"
    assert main(["check", "r.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "file": "r.yaml",
            "line": 10,
            "column": 44,
            "path": "routes.llm[1]",
            "message": message,
            "severity": "warning",
        }
    ]
