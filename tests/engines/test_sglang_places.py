"""Ranks on a CPU have cores of their own, and say how to get them before any of them is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.fake_rank import crew_of
from tokenflow.engines.sglang import load
from tokenflow.engines.sglang.load import place_of
from tokenflow.errors import ModelLoadError
from tokenflow.settings import SGLANG_CORES


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.parametrize("cores", ["0|1", "0-3|4-7", "0,2|1", "0|1|2"])
def test_cores_for_every_rank_are_enough(monkeypatch: pytest.MonkeyPatch, cores: str) -> None:
    monkeypatch.setenv(SGLANG_CORES, cores)
    assert place_of("cpu", 1) == ("cpu", 1)


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        (
            "0",
            "rank 1 has no cores: SGLANG_CPU_OMP_THREADS_BIND is '0'; set SGLANG_CPU_OMP_THREADS_BIND to the",
        ),
        ("", "rank 1 has no cores: SGLANG_CPU_OMP_THREADS_BIND is ''; set"),
        ("0|x", "SGLANG_CPU_OMP_THREADS_BIND has 'x' for the cores of a rank; it must be like 0-3 or 0,2"),
        ("0-3|5-4", "SGLANG_CPU_OMP_THREADS_BIND has '5-4' for the cores of a rank; it must be like 0-3"),
        (
            "0-3|6-9",
            "SGLANG_CPU_OMP_THREADS_BIND has '6-9' for the cores of a rank, and there is no core 8 for",
        ),
    ],
)
def test_too_few_cores_are_told_with_the_variable_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: str, message: str
) -> None:
    monkeypatch.setenv(SGLANG_CORES, cores)
    with pytest.raises(ModelLoadError) as refused:
        crew_of(tmp_path, 2)
    assert message in str(refused.value)
    assert not any(tmp_path.iterdir()), "a rank was started"


@pytest.mark.parametrize("cores", ["8", "0,8", "0-999999999999", "8|0"])
def test_cores_that_a_process_may_not_use_are_told_for_a_single_rank_too(
    monkeypatch: pytest.MonkeyPatch, cores: str
) -> None:
    monkeypatch.setenv(SGLANG_CORES, cores)
    with pytest.raises(ModelLoadError) as refused:
        place_of("cpu", 0)
    first = cores.partition("|")[0]
    assert str(refused.value) == (
        f"SGLANG_CPU_OMP_THREADS_BIND has {first!r} for the cores of a rank, and there is no core 8 for this "
        "process; it may use 0,1,2,3,4,5,6,7"
    )


def test_cores_of_ranks_that_a_model_does_not_have_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model of the recipe may have them, on another machine."""
    monkeypatch.setenv(SGLANG_CORES, "0|8")
    assert place_of("cpu", 0) == ("cpu", 0)


@pytest.mark.parametrize("cores", [None, "all"])
def test_without_a_word_each_rank_has_a_numa_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: str | None
) -> None:
    if cores is None:
        monkeypatch.delenv(SGLANG_CORES, raising=False)
    else:
        monkeypatch.setenv(SGLANG_CORES, cores)
    monkeypatch.setattr(load, "_NODES", tmp_path)
    (tmp_path / "node0").mkdir()
    with pytest.raises(ModelLoadError) as refused:
        place_of("cpu", 1)
    assert str(refused.value) == (
        "tensor_parallel: rank 1 has no cores: this machine has 1 NUMA node(s), of which each rank gets one; "
        "set SGLANG_CPU_OMP_THREADS_BIND to the cores of every rank, as in 0|1, or lower tensor_parallel"
    )
    (tmp_path / "node1").mkdir()
    assert place_of("cpu", 1) == ("cpu", 1)
