"""Settings from the environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenflow.errors import TokenflowError
from tokenflow.settings import settings, worker_environment


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_the_hub_can_be_left_alone(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert settings().hub_offline


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_the_hub_is_asked_otherwise(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert not settings().hub_offline


def test_any_value_of_no_color_counts_but_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "0")
    assert settings().no_color
    settings.cache_clear()
    monkeypatch.setenv("NO_COLOR", "")
    assert not settings().no_color


def test_the_log_level_is_a_warning_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENFLOW_LOG_LEVEL", raising=False)
    assert settings().log_level == "WARNING"
    settings.cache_clear()
    monkeypatch.setenv("TOKENFLOW_LOG_LEVEL", "Debug")
    assert settings().log_level == "DEBUG"


def test_a_log_level_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLOW_LOG_LEVEL", "loud")
    with pytest.raises(TokenflowError, match=r"^TOKENFLOW_LOG_LEVEL is 'loud'; it must be one of .*warning"):
        settings()


def test_a_worker_uses_only_the_threads_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("KEPT", "yes")
    environment = worker_environment(2)
    assert {environment[name] for name in environment if name.endswith("NUM_THREADS")} == {"2"}
    assert environment["KEPT"] == "yes"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=3", "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_worker_asks_for_huge_pages_unless_told_otherwise(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    assert worker_environment(1)["GLIBC_TUNABLES"] == expected
