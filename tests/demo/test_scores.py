from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.demo import accuracy
from recipes.demo.scores import Outcome, markdown, overall_table, score, task_table


def row(
    text: str = "Answer: 12", reference: str = "Answer: 12", models: str = "ssls", **more: Any
) -> dict[str, Any]:
    names = [{"s": "slm", "l": "llm"}[letter] for letter in models]
    return {
        "id": 0,
        "task": "mul",
        "reference": reference,
        "text": text,
        "tokens": [{"id": 5, "text": "x", "model": name, "logprob": None} for name in names],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": len(names),
            "by_model": {"slm": names.count("slm"), "llm": names.count("llm")},
            "handoffs": 2,
            "dropped": 1,
        },
        **more,
    }


def test_a_row_is_scored_by_its_final_value_and_its_tokens() -> None:
    scored = accuracy.outcome(row(text="3*4=12. Answer: 12"))
    assert scored == Outcome("mul", correct=True, exact=False, tokens=4, large_tokens=1, handoffs=2)


def test_the_share_counts_tokens_and_not_answers() -> None:
    total = score([accuracy.outcome(row(models="llllllll")), accuracy.outcome(row(text="?", models="ss"))])
    assert (total.accuracy, total.exact, total.share, total.tokens) == (0.5, 0.5, 0.8, 5)


def test_nothing_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="no answers"):
        score([])


def test_tables_have_a_line_per_setting_and_a_column_per_task_met() -> None:
    results = {"a": [accuracy.outcome(row())], "b": [accuracy.outcome(row(task="ledger"))]}
    overall = overall_table(results).splitlines()
    assert overall[2].split("|")[1:6] == [
        " a       ",
        " 1.000    ",
        " 1.000            ",
        " 0.2500              ",
        " 2.0               ",
    ]
    by_task = [[cell.strip() for cell in line.split("|")[1:-1]] for line in task_table(results).splitlines()]
    assert by_task[0] == ["accuracy @ LLM share", "mul", "ledger"]
    assert by_task[2:] == [["a", "1.00 @ 0.250", "-"], ["b", "-", "1.00 @ 0.250"]]


def test_columns_line_up() -> None:
    assert markdown(["a", "bb"], [["ccc", "d"]]) == "| a   | bb |\n| --- | -- |\n| ccc | d  |"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_file_of_rows_gives_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "out.jsonl", row(), row(text="12, more\u2028", task="json"))
    monkeypatch.setattr("sys.argv", ["accuracy", str(path)])
    accuracy.main()
    printed = capsys.readouterr().out
    assert f"| {path} | 0.500 " in printed
    assert "1.00 @ 0.250" in printed


def miscounted(good: dict[str, Any]) -> dict[str, Any]:
    return {**good, "usage": {**good["usage"], "by_model": {"slm": 4}}}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda good: {**good, "error": {"type": "RouteFailed"}}, "request failed"),
        (
            lambda good: {key: value for key, value in good.items() if key != "reference"},
            "no key 'reference'",
        ),
        (miscounted, "usage"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    path = write(tmp_path / "out.jsonl", row(), spoil(row()))
    with pytest.raises(ValueError, match=rf"out\.jsonl:2: .*{message}"):
        accuracy.outcomes(path)


def test_an_empty_file_and_a_missing_one_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no rows"):
        accuracy.outcomes(write(tmp_path / "empty.jsonl"))
    monkeypatch.setattr("sys.argv", ["accuracy", str(tmp_path / "missing.jsonl")])
    with pytest.raises(SystemExit, match=r"error: .*missing\.jsonl"):
        accuracy.main()
