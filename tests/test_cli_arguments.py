from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from tokenflow import cli


def parsed(monkeypatch: pytest.MonkeyPatch, *argv: str) -> argparse.Namespace:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "_run", lambda args: seen.append(args) or 0)
    assert cli.main(["run", *argv]) == 0
    return seen[0]


@pytest.mark.parametrize(
    "argv",
    [
        ("r.yaml", "Hello", "--trace", "--seed", "3"),
        ("r.yaml", "--trace", "--seed", "3", "Hello"),
        ("r.yaml", "--trace", "Hello", "--seed", "3"),
        ("--trace", "r.yaml", "--seed", "3", "Hello"),
        ("--trace", "--seed", "3", "r.yaml", "Hello"),
    ],
)
def test_the_prompt_may_stand_anywhere_after_the_recipe(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    args = parsed(monkeypatch, *argv)
    assert (args.recipe, args.prompt, args.trace, args.seed) == ("r.yaml", "Hello", True, 3)


def test_a_dash_for_stdin_may_follow_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(monkeypatch, "r.yaml", "--json", "-").prompt == "-"


def test_a_prompt_that_looks_like_a_flag_follows_two_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (
        ("r.yaml", "--", "-x"),
        ("r.yaml", "--seed", "3", "--", "-x"),
        ("--trace", "r.yaml", "--", "-x"),
    ):
        assert parsed(monkeypatch, *argv).prompt == "-x"


@pytest.mark.parametrize(
    ("argv", "rest"),
    [
        (("run", "r.yaml", "--trace", "a", "b"), "a b"),
        (("run", "r.yaml", "a", "--trace", "b"), "b"),
        (("run", "r.yaml", "--tracing"), "--tracing"),
        (("check", "r.yaml", "extra"), "extra"),
    ],
)
def test_what_is_left_over_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], rest: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    assert f"unrecognized arguments: {rest}\n" in capsys.readouterr().err


def test_help_and_version_need_no_recipe() -> None:
    for flag in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-m", "tokenflow.cli", flag], capture_output=True, text=True)
        assert done.returncode == 0
        assert "tokenflow" in done.stdout
