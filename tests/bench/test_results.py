"""Results are kept run by run, and never mixed between machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.compare.results import Results


def test_a_run_that_was_made_is_there_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    results = Results(file)
    results.note_machine({"cpu": "one"})
    assert not results.has("cell", "system", 0)
    results.add("cell", "system", 0, {"decode": 123.456789, "ttft_s": [0.123456789], "tokens": 1234567})
    again = Results(file)
    assert again.has("cell", "system", 0)
    assert not again.has("cell", "system", 1)
    run = {"cell": "cell", "system": "system", "repetition": 0}
    assert again.of("cell", "system") == [run | {"decode": 123.46, "ttft_s": [0.12346], "tokens": 1234567}]


def test_runs_of_another_machine_are_not_added_to(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    results = Results(file)
    results.note_machine({"cpu": "one"})
    results.add("cell", "system", 0, {})
    Results(file).note_machine({"cpu": "one"})
    with pytest.raises(SystemExit, match=r"another machine.*--results"):
        Results(file).note_machine({"cpu": "two"})


@pytest.mark.parametrize("text", ["half a fi", "[]", "{}", '{"runs": 3}', "\x80"])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit, match=r"results\.json does not hold results.*--results"):
        Results(file)
    assert file.read_bytes() == text.encode("latin-1")


def test_a_place_where_nothing_can_be_written_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be kept in"):
        Results(tmp_path / "file" / "results.json").note_machine({"cpu": "one"})


def test_an_interrupted_write_leaves_the_results_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    Results(file).add("cell", "system", 0, {})
    file.with_suffix(".tmp").write_text("half a fi")
    assert Results(file).has("cell", "system", 0)
    assert json.loads(file.read_text())["runs"]
