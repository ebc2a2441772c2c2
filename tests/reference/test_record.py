from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.reference import rules
from tests.reference.cases import DEMO, PAIR, TAUS, TRIO, Case, Speculation, r_stitch
from tests.reference.record import (
    ALGORITHMS,
    R_STITCH,
    RECORDS,
    Record,
    Recorded,
    StaleTraces,
    encode,
    eval_rows,
    load_models,
    load_traces,
    write,
)
from tests.reference.reference import compare

SHORT = 60
"""Traces of fewer tokens are recomputed in every test run."""


@pytest.fixture(scope="module", params=RECORDS)
def record(request: pytest.FixtureRequest) -> Record:
    return RECORDS[request.param]


@pytest.fixture(scope="module")
def recorded(record: Record) -> Recorded:
    return load_traces(record)


def test_a_record_covers_every_setting_and_prompt(record: Record, recorded: Recorded) -> None:
    assert len(recorded.prompts) == record.count
    assert set(recorded.traces) == {(name, i) for name in record.cases() for i in range(record.count)}
    for trace in recorded.traces.values():
        assert len(trace.tokens) == len(trace.models)
        assert (trace.finish_reason == "stop") == (trace.tokens[-1] == 2)
        assert len(trace.tokens) <= recorded.max_tokens


def test_some_traces_of_every_setting_come_out_again(record: Record, recorded: Recorded) -> None:
    cases = record.cases()
    models = load_models(cases)
    for number, (name, case) in enumerate(cases.items()):
        short = [i for i in range(record.count) if len(recorded.traces[name, i].tokens) < SHORT]
        index = short[7 * number % len(short)]
        trace = case.trace(models[name], recorded.prompts[index], index, recorded.max_tokens)
        assert compare(recorded.traces[name, index], trace.tokens, trace.models) is None, (name, index)


def test_r_stitch_is_recorded_from_one_model_alone_to_the_other() -> None:
    recorded = load_traces(R_STITCH)
    for (name, _), trace in recorded.traces.items():
        if name == r_stitch(TAUS[0]):
            assert set(trace.models) == {"llm"}
        if name == r_stitch(TAUS[-1]):
            assert set(trace.models) == {"slm"}


def test_three_models_hand_over_each_to_each() -> None:
    recorded = load_traces(ALGORITHMS)
    ways = {
        (before, after)
        for (name, _), trace in recorded.traces.items()
        if name == "cascade"
        for before, after in zip(trace.models, trace.models[1:], strict=False)
        if before != after
    }
    assert ways == {(a, b) for a in TRIO for b in TRIO if a != b}


def test_what_checks_drafts_writes_what_it_would_write_alone() -> None:
    recorded, alone = load_traces(ALGORITHMS), load_traces(R_STITCH)
    for index in range(ALGORITHMS.count):
        checked, own = recorded.traces["speculative", index], alone.traces[r_stitch(-1.0), index]
        assert checked.tokens == own.tokens
        assert checked.finish_reason == own.finish_reason
        assert checked.models.count("llm") < len(checked.models) / 2


def test_messages_and_prompts_of_the_evaluation_have_the_same_ids() -> None:
    rows = eval_rows(50)
    as_prompts = [{"prompt": row["prompt"]} for row in rows]
    assert encode(rows, DEMO / "small") == encode(as_prompts, DEMO / "small")


def test_a_record_of_other_weights_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "small", tmp_path / "small")
    (tmp_path / "large").symlink_to(DEMO / "large")
    file = tmp_path / "small" / "model.safetensors"
    weights = bytearray(file.read_bytes())
    weights[-1] ^= 1
    file.write_bytes(weights)
    with pytest.raises(StaleTraces, match=r"other weights; record anew: .* r_stitch"):
        load_traces(R_STITCH, tmp_path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"reference": 0}, "reference"), ({"count": 299}, "prompts"), ({"settings": {}}, "settings")],
)
def test_a_record_of_another_reference_or_of_other_prompts_or_settings_is_refused(
    changes: Mapping[str, Any], what: str, tmp_path: Path
) -> None:
    with gzip.open(R_STITCH.path, "rt") as lines:
        head, *rows = lines.readlines()
    with gzip.open(tmp_path / R_STITCH.path.name, "wt") as file:
        file.writelines([json.dumps({**json.loads(head), **changes}) + "\n", *rows])
    with pytest.raises(StaleTraces, match=f"other {what}.*; record anew"):
        load_traces(replace(R_STITCH, folder=tmp_path))


def test_what_is_recorded_is_read_back_and_the_same_traces_give_the_same_file(tmp_path: Path) -> None:
    cases: Mapping[str, Case | Speculation] = {
        "stitch": Case(rules.RStitch(0.1)),
        "ensemble": Case(rules.Ensemble({"slm": 1, "mid": 1, "llm": 1}), TRIO, temperature=1.0),
        "speculation": Speculation(2, PAIR),
    }
    small = [Record("few", lambda: cases, 1, max_tokens=5, folder=tmp_path / name) for name in "ab"]
    for record in small:
        assert list(write(record, processes=1)) == [1]
    assert small[0].path.read_bytes() == small[1].path.read_bytes()
    read, models = load_traces(small[0]), load_models(cases)
    assert read.max_tokens == 5
    assert read.traces == {
        (name, 0): case.trace(models[name], read.prompts[0], 0, 5) for name, case in cases.items()
    }
