"""Settings of the server: flags, their twins in the environment, defaults."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from tokenflow.cli import _parser
from tokenflow.server.options import Options, options


def parsed(*args: str) -> argparse.Namespace:
    return _parser().parse_args(["serve", "recipe.yaml", *args])


def test_what_nobody_says_is_as_it_is_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLOW_HOST", "")
    assert options(parsed()) == Options()
    assert Options().changed() == {}


def test_every_setting_has_a_flag_and_a_variable_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "host": ("::1", "0.0.0.0", "::1"),
        "port": ("9000", "9001", 9000),
        "uds": ("/tmp/a", "/tmp/b", "/tmp/a"),
        "served_model_name": ("a", "b c", ("a",)),
        "api_key": ("k", "l m", ("k",)),
        "max_queued_reqs": ("0", "7", 0),
        "request_timeout": ("2.5", "3", 2.5),
        "max_model_len": ("512", "1024", 512),
        "drain_timeout": ("1.5", "2", 1.5),
        "log_level": ("DEBUG", "info", "debug"),
    }
    by_variable = {
        "served_model_name": ("b", "c"),
        "api_key": ("l", "m"),
        "drain_timeout": 2.0,
        "request_timeout": 3.0,
    }
    assert {field.name for field in fields(Options)} == {*said, "access_log"}
    for name, (_, variable, _) in said.items():
        monkeypatch.setenv(f"TOKENFLOW_{name.upper()}", variable)
    monkeypatch.setenv("TOKENFLOW_ACCESS_LOG", "yes")
    found = options(parsed())
    for name, (_, variable, _) in said.items():
        expected = by_variable.get(name, int(variable) if variable.isdecimal() else variable)
        assert getattr(found, name) == expected
    assert found.access_log is True
    for name, (flag, _, expected) in said.items():
        assert getattr(options(parsed(f"--{name.replace('_', '-')}", flag)), name) == expected


def test_what_may_be_repeated_is_kept_in_order_and_another_name_is_known() -> None:
    found = options(parsed("--api-key", "a b", "--api-key", "c", "--context-length", "64"))
    assert (found.api_key, found.max_model_len) == (("a b", "c"), 64)
    assert found.changed() == {"api_key": "***", "max_model_len": 64}
