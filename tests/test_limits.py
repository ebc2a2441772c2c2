"""Few files, and everything that is said about it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokenflow.limits import said


@pytest.mark.parametrize("most", [8, 10, 14, 20, 28, 40])
@pytest.mark.parametrize("recipe", ["recipes/sim.yaml"])
def test_a_run_that_may_open_few_files_says_so_in_a_line(recipe: str, most: int) -> None:
    command = f"ulimit -n {most}; exec {sys.executable} -m tokenflow.cli run {recipe} hi"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"tokenflow: this process may have {most} files open (ulimit -n), and has ")
    assert last.endswith("raise the limit (ulimit -n 1024)")
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr


def test_a_run_may_open_as_many_files_as_it_needs_if_its_user_may() -> None:
    command = (
        f"ulimit -S -n 12; exec {sys.executable} -m tokenflow.cli run recipes/sim.yaml hi --max-tokens 2"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_an_error_about_too_many_files_says_what_to_do() -> None:
    assert said(OSError(24, "Too many open files")).endswith("; raise the limit (ulimit -n)")
    assert said(OSError(2, "No such file or directory")) == "[Errno 2] No such file or directory"
