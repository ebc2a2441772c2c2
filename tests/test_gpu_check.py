"""The check for a machine with a GPU, as far as a machine without one can tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu_check import ON_CPU, ON_GPU, TINY, main, recipe, step_times
from bench.shapes import write_model

PLAN = replace(ON_CPU, shapes={"0.6B": TINY, "8B": TINY}, steps=2, tokens=4)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {name: write_model(tmp_path / name, shape) for name, shape in PLAN.shapes.items()}


def test_a_machine_without_a_gpu_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("error: there is no GPU here; --device cpu tries the check itself")


def test_steps_are_timed_and_one_that_fails_leaves_the_others_alone(folders: dict[str, Path]) -> None:
    (folders["0.6B"] / "model.safetensors").unlink()
    head, broken, timed = step_times(PLAN, ("torch",), folders)
    assert head.split() == ["decode", "step,", "ms", "batch", "1", "batch", "2"]
    assert broken.startswith("torch 0.6B") and "failed: tokenflow.errors.ModelLoadError: " in broken
    assert all(0 < float(value) < 1000 for value in timed.removeprefix("torch 8B").split())


def test_the_pair_hands_over_and_is_timed(folders: dict[str, Path]) -> None:
    head, rates = recipe(PLAN, ("torch",), folders)
    assert head.split()[:2] == ["pair,", "tokens/s"]
    values = rates.removeprefix("0.6B torch, 8B torch").split()
    assert len(values) == len(PLAN.concurrencies)
    assert all(float(value) > 0 for value in values)


def test_the_shapes_on_a_gpu_are_those_of_qwen3() -> None:
    """Parameters without the embeddings, which Qwen3-8B has twice."""
    small, large = ON_GPU.shapes["0.6B"], ON_GPU.shapes["8B"]
    assert small.parameters == 596_049_920
    assert large.parameters + large.vocab * large.hidden == pytest.approx(8.19e9, rel=0.001)
    assert max(ON_GPU.concurrencies) == 16
