"""What the repository says about itself agrees: version, changelog, README, Makefile, public names."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import tokenflow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_newest_changelog_entry_is_this_version_or_unreleased() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] in {"Unreleased", PROJECT["version"]}


def test_every_public_name_exists_once_and_in_order() -> None:
    names = list(tokenflow.__all__)
    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(tokenflow, name)] == []


def test_the_installed_package_has_the_version_of_the_project_file() -> None:
    assert version("tokenflow") == PROJECT["version"]


def test_the_readme_names_only_make_targets_that_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(code_of(README))))
    assert {"demo", "test"} <= named
    assert named <= TARGETS


def test_the_checks_run_only_make_targets_that_exist() -> None:
    named = re.findall(r"\bmake ([a-z-]+)", (ROOT / ".ci" / "run").read_text())
    assert "test" in named
    assert set(named) <= TARGETS


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_version_is_pinned_exactly_and_covers_the_direct_requirements() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line)] == []
    pinned = {normal(line) for line in lines}
    required = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    assert {normal(requirement) for requirement in required} <= pinned


@pytest.mark.parametrize("module", ["tokenflow", "tokenflow.cli"])
def test_importing_the_command_line_loads_no_heavy_package(module: str) -> None:
    assert {"torch", "pydantic", "transformers", "numpy"} & packages_loaded_by(module) == set()


def test_importing_the_router_loads_no_torch() -> None:
    loaded = packages_loaded_by("tokenflow.router")
    assert "anyio" in loaded
    assert {"torch", "transformers"} & loaded == set()


def packages_loaded_by(module: str) -> set[str]:
    """Top-level packages in a fresh interpreter after an import."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in done.stdout.split()}


def code_of(markdown: str) -> list[str]:
    """The code blocks and code spans of a Markdown text."""
    return re.findall(r"```.*?```|`[^`\n]+`", markdown, re.DOTALL)


def normal(requirement: str) -> str:
    """The normalised project name at the start of a requirement."""
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()
