from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.reference import record
from tests.reference.record import MODELS, TAUS, TRACES, Recorded, StaleTraces, encode, eval_rows, load_traces
from tests.reference.reference import ReferenceModels, RStitch, compare


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return load_traces()


def test_the_record_covers_every_tau_and_prompt(recorded: Recorded) -> None:
    assert len(recorded.prompts) == 300
    assert set(recorded.traces) == {(tau, index) for tau in TAUS for index in range(300)}
    for (tau, _), trace in recorded.traces.items():
        assert len(trace.tokens) == len(trace.models)
        assert (trace.finish_reason == "stop") == (trace.tokens[-1] == 2)
        assert len(trace.tokens) <= recorded.max_tokens
        if tau == -1:
            assert set(trace.models) == {"llm"}
        if tau == 1:
            assert set(trace.models) == {"slm"}


def test_twenty_recorded_traces_come_out_again(recorded: Recorded) -> None:
    models = ReferenceModels.load(MODELS)
    for number, tau in enumerate(TAUS):
        for index in range(11 * number, 300, 75):
            trace = models.run(RStitch(tau), recorded.prompts[index], recorded.max_tokens)
            expected = recorded.traces[tau, index]
            assert compare(expected, trace.tokens, trace.models) is None, (tau, index)


def test_messages_and_prompts_of_the_evaluation_have_the_same_ids() -> None:
    rows = eval_rows(50)
    as_prompts = [{"prompt": row["prompt"]} for row in rows]
    assert encode(rows, MODELS["slm"]) == encode(as_prompts, MODELS["slm"])


def rewritten(tmp_path: Path, **changes: Any) -> Path:
    """A copy of the record with another head."""
    with gzip.open(TRACES, "rt") as lines:
        head, *rows = lines.readlines()
    path = tmp_path / "traces.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines([json.dumps({**json.loads(head), **changes}) + "\n", *rows])
    return path


def test_a_record_of_other_weights_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "small"
    shutil.copytree(MODELS["slm"], other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(StaleTraces, match="other weights; record anew"):
        load_traces({**MODELS, "slm": other})


def test_a_record_of_another_reference_or_of_other_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StaleTraces, match="other reference; record anew"):
        load_traces(path=rewritten(tmp_path, reference=0))
    with pytest.raises(StaleTraces, match="other prompts; record anew"):
        load_traces(path=rewritten(tmp_path, count=299))


def test_what_is_recorded_is_read_back_and_the_same_traces_give_the_same_file(tmp_path: Path) -> None:
    first, again = tmp_path / "new" / "first.jsonl.gz", tmp_path / "again.jsonl.gz"
    for path in (first, again):
        assert list(record.record(path, [0.1, 1.0], count=1, max_tokens=5, processes=1)) == [1]
    assert first.read_bytes() == again.read_bytes()
    read = load_traces(path=first)
    models = ReferenceModels.load(MODELS)
    assert read.max_tokens == 5
    assert read.traces == {(tau, 0): models.run(RStitch(tau), read.prompts[0], 5) for tau in (0.1, 1.0)}
