"""Files for deployment agree with the server that they start."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import yaml

from tokenflow.cli import _parser
from tokenflow.server.options import Options

DEPLOY = Path(__file__).parents[1] / "deploy"
VARIABLES = {f"TOKENFLOW_{name.upper()}" for name in Options.__dataclass_fields__}


def test_every_variable_is_one_of_the_servers() -> None:
    for path in DEPLOY.iterdir():
        assert set(re.findall(r"TOKENFLOW_[A-Z_]+", path.read_text())) <= VARIABLES, path.name


def test_commands_are_those_of_the_command_line() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["tokenflow"]
    assert _parser().parse_args(["serve", "recipe.yaml"]).recipe == "recipe.yaml"
    assert service["command"][0] == "serve"
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["tokenflow"]' in dockerfile
    assert "USER tokenflow" in dockerfile
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        assert all((DEPLOY.parent / name).exists() for name in source.split())


def test_containers_and_units_wait_longer_than_the_drain() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["tokenflow"]
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > service["environment"]["TOKENFLOW_DRAIN_TIMEOUT"] == Options().drain_timeout
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "tokenflow.service")
    assert int(unit["Service"]["TimeoutStopSec"]) > Options().drain_timeout
    assert unit["Service"]["ExecStart"].endswith("tokenflow serve ${RECIPE}")


def test_prometheus_asks_the_server_that_compose_starts() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["tokenflow:8000"]
