"""A server of the demo recipe for clients that live in an environment of their own: ``make clients``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("TOKENFLOW_PYTHON", "python")
"""The interpreter that has tokenflow; the clients' own has not."""

MODEL = "r-stitch-demo"


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """Where the demo recipe is served, up to /v1."""
    command = [PYTHON, "-m", "tokenflow.cli", "serve", "recipes/demo.yaml", "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    ready = next(line for line in server.stderr if "ready in" in line)
    yield f"{ready.rsplit(' ', 1)[1].strip()}/v1"
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)
    assert server.returncode == 0


def run(rows: list[dict[str, Any]], *args: str) -> list[dict[str, Any]]:
    """What ``tokenflow run`` answers to input rows, without a server in between."""
    lines = "\n".join(json.dumps(row) for row in rows)
    command = [
        PYTHON,
        "-m",
        "tokenflow.cli",
        "run",
        "recipes/demo.yaml",
        "--input",
        "/dev/stdin",
        "--json",
        *args,
    ]
    done = subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
