"""What cannot be run is refused before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.compare import __main__ as compare


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cells", "("], "no regular expression"),
        (["--systems", "["], "no regular expression"),
        (["--vllm-python", "/nowhere/python"], "is no program"),
        (["--repetitions", "0"], "at least one"),
        (["--limit", "0"], "more than no time"),
        (["--limit", "inf"], "more than no time"),
        (["--budget", "255"], "more than 255 s"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    with pytest.raises(SystemExit) as error:
        compare.main()
    assert error.value.code == 2
    assert reason in capsys.readouterr().err


def test_two_comparisons_do_not_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "MODELS", tmp_path / "models")
    with compare.alone():
        with pytest.raises(SystemExit, match="another comparison"), compare.alone():
            pass
        with pytest.raises(SystemExit, match="another comparison"), compare.alone():
            pass
    with compare.alone():
        pass
