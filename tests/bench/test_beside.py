"""Tables of other benches: what they kept, beside the first."""

from __future__ import annotations

import json
from pathlib import Path

from bench.compare import beside


def test_an_ablation_shows_what_is_left_of_the_full_line(tmp_path: Path) -> None:
    file = tmp_path / "ablation.json"
    full, less = ([{"decode": value} for value in values] for values in ((90.0, 100.0, 190.0), (50.0,)))
    file.write_text(json.dumps({"lines": {"full": {"4": full}, "no lookahead": {"4": less}}}))
    assert beside.ablation(file).splitlines() == [
        "|  | N = 4 |",
        "| --- | --- |",
        "| full | 100 (100 %) |",
        "| no lookahead | 50 (50 %) |",
    ]


def test_steps_show_the_engine_over_each_that_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    row = {
        "batch": 4,
        "engine_median_ms": 6.0,
        "vllm_eager_median_ms": 5.0,
        "engine_over_vllm_eager_median": 1.2,
    }
    file.write_text(json.dumps({"batches": [row]}))
    assert beside.step(file).splitlines() == [
        "| batch | tokenflow | vLLM, eager |",
        "| --- | --- | --- |",
        "| 4 | 6.00 | 5.00 (1.20) |",
    ]


def test_what_was_not_measured_has_no_table(tmp_path: Path) -> None:
    assert beside.ablation(tmp_path / "none") == beside.step(tmp_path / "none") == ""
