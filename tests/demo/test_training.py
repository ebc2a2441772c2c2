from __future__ import annotations

import itertools
import json
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demo import calibrate, co_llm, policies, train, train_heads
from recipes.demo.decoder import Decoder
from recipes.demo.heads import load_citer, load_r2r
from recipes.demo.tokenizer import EOS, PAD
from recipes.demo.train import IGNORED, Options, Schedule

HERE = Path(train.__file__).parent


def options(out: Path, **more: object) -> Options:
    shape = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 48, "lr": 5e-3, "steps": 3}
    return Options(**{"name": "tiny", "out": out, **shape, **more})  # type: ignore[arg-type]


def test_a_short_run_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    train.train(options(tmp_path, steps=2))
    saved = tmp_path / "tiny"
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.dtype == torch.bfloat16
    assert json.loads((saved / "config.json").read_text())["rope_theta"] == 10000.0
    assert "backend" not in json.loads((saved / "tokenizer_config.json").read_text())
    assert len(AutoTokenizer.from_pretrained(saved)) == 100
    assert json.loads((saved / "train_log.json").read_text())["steps"] == 2


def test_a_run_repeats_bit_for_bit_and_can_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train.train(options(tmp_path, name=name))
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    further = train.build(options(tmp_path, start_from=tmp_path / "one")).state_dict()
    assert all(torch.equal(further[key], one[key].float()) for key in one)


def test_batches_hold_whole_answers_and_the_loss_covers_nothing_else(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    for inputs, labels in itertools.islice(train.batches(Random(1), chosen, Schedule(chosen)), 20):
        assert inputs.shape == labels.shape
        assert len(inputs) > 1
        covered = labels != IGNORED
        assert torch.equal(labels[covered], inputs[covered])
        assert not (inputs[covered] == PAD).any()
        assert (covered & (inputs == EOS)).sum() == len(inputs)


def test_the_schedule_rises_then_falls_to_2_percent(tmp_path: Path) -> None:
    schedule = Schedule(options(tmp_path, steps=1000, lr=1.0))
    assert schedule.learning_rate == pytest.approx(1 / 150)
    schedule.step = 150
    assert 0.9 < schedule.learning_rate < 1
    schedule.step = 1000
    assert schedule.progress == 1
    assert schedule.learning_rate == pytest.approx(0.02)


@given(st.lists(st.tuples(st.integers(-9, 9), st.booleans()), min_size=2, unique_by=lambda pair: pair[0]))
def test_the_area_under_the_curve_counts_pairs_in_the_right_order(pairs: list[tuple[int, bool]]) -> None:
    positives = [score for score, label in pairs if label]
    negatives = [score for score, label in pairs if not label]
    if positives and negatives:
        right = sum(p > n for p in positives for n in negatives) / (len(positives) * len(negatives))
        scores, labels = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs, strict=True))
        assert calibrate.area_under_curve(scores, labels) == pytest.approx(right, abs=1e-6)


def test_the_mixture_loss_prefers_deferring_where_the_model_is_wrong() -> None:
    logits = torch.full((2, co_llm.DEFER_ID + 1), -4.0)
    logits[:, 7] = 4.0

    def loss(defer: float, target: int) -> float:
        given = logits.clone()
        given[:, co_llm.DEFER_ID] = defer
        return co_llm.mixture_loss(given, torch.tensor([target, target])).item()

    assert loss(3.0, target=8) < loss(-3.0, target=8)
    assert loss(-3.0, target=7) < loss(3.0, target=7)


def test_heads_train_from_end_to_end_and_load_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "CANDIDATE_SHARES", (0.1, 0.3))
    monkeypatch.setattr(policies, "MAX_NEW_TOKENS", 100)
    train_heads.train(
        train_heads.Options(
            small=HERE / "small",
            large=HERE / "mid",
            out=tmp_path,
            per_task=4,
            val=1,
            target=0.97,
            collm_steps=20,
            collm_lr=1e-3,
        )
    )
    report = json.loads((tmp_path / "heads.json").read_text())
    assert report.keys() == {"r2r", "citer", "collm"}
    small, tuned = Decoder(HERE / "small"), Decoder(tmp_path / "collm_small")
    assert load_r2r(tmp_path / "r2r/default_router.pt", small.embedding).training is False
    assert load_citer(tmp_path / "citer/citer_mlp.pth").training is False
    assert tuned.defer_id == co_llm.DEFER_ID
    assert len(tuned.embedding) == co_llm.DEFER_ID + 1
    assert tuned.config.defer_threshold == report["collm"]["threshold"]
    shipped = json.loads((HERE / "heads/heads.json").read_text())
    assert {name: entry.keys() for name, entry in shipped.items()} == {
        name: entry.keys() for name, entry in report.items()
    }
