"""Tables come from the results alone, and fill the marks of a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.compare import report, work
from bench.compare.__main__ import planned
from bench.compare.results import RESULTS, Results
from bench.compare.servers import ON_SGLANG, SYSTEMS

LOW = work.Cell("r2r", work.SMALL_PAIR, work.LOW, 4)
HIGH = work.Cell("r2r", work.SMALL_PAIR, work.HIGH, 4)
ALONE = work.Cell(work.ALONE, work.SMALL_PAIR, work.LOW, 4)


def run(decode: float, **more: Any) -> dict[str, Any]:
    figures = {"elapsed_s": 2.0, "tokens": 100, "requests": 8, "finished": 8, "decode_s": 1.0}
    lists = {"ttft_s": [0.1, 0.3], "latency_s": [1.0]}
    return {**figures, **lists, "decode": decode, "end_to_end": decode / 2, "cpu_ms_per_token": 1.0, **more}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Three repetitions of a cell, in which vLLM is faster per visit than per token."""
    results = Results(tmp_path / "results.json")
    ours, loop, visit, token, _ = (system.name for system in SYSTEMS)
    for repetition, decode in enumerate((900.0, 1000.0, 1200.0)):
        results.add(LOW.name, ours, repetition, run(decode, bound=decode, steps_bound=decode / 1.6))
        results.add(HIGH.name, ours, repetition, run(0.99 * decode, bound=0.9 * decode))
        results.add(LOW.name, loop, repetition, run(100.0))
        results.add(LOW.name, visit, repetition, run(400.0))
        results.add(LOW.name, token, repetition, run(250.0))
    results.add(ALONE.name, ours, 0, run(300.0))
    results.add(ALONE.name, visit, 0, run(200.0))
    return results


def test_gains_are_over_the_strongest_median(results: Results) -> None:
    row = report.Row(LOW, results)
    assert report.gains(row, "decode") == ("4.00", "2.50")
    assert report.gains(row, "end_to_end") == ("4.00", "2.50")
    assert report.share(row.of_bound("bound")) == "50.0 %"
    assert report.share(row.of_bound("steps_bound")) == "80.0 %"


def test_a_model_alone_has_no_visits_that_could_be_foretold(results: Results) -> None:
    assert report.gains(report.Row(ALONE, results), "decode") == ("1.50", "1.50")


def test_a_row_shows_medians_and_their_spread(results: Results) -> None:
    made = report.blocks(results)
    (line,) = [line for line in made["decode low"].splitlines() if line.startswith("| r2r")]
    assert "1,000 ± 15 %" in line
    assert "**4.00** | **2.50** | 500 ± 15 % | 4.00 | 2.50 | 50.0 % | 80.0 % |" in line
    (line,) = [line for line in made["effort"].splitlines() if line.startswith("| r2r")]
    assert line.startswith("| r2r | 99.0 % |") and line.endswith("| 90.0 % |")
    assert "4.00 to 4.00, mean 4.00" in made["summary"]


def test_without_a_peer_there_is_no_gain_to_sum_up(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.add(LOW.name, SYSTEMS[0].name, 0, run(900.0))
    results.add(LOW.name, ON_SGLANG.name, 0, run(300.0))
    assert report.blocks(results)["summary"].splitlines()[2:] == ["| low (100 in, 256 out) |  |  |  |  |"]


def test_a_page_is_filled_between_its_marks_and_again(results: Results, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "plot.svg"
    page.write_text("before\n\n<!-- decode low -->\n\nold\n\n<!-- end -->\n\nafter\n")
    report.write(results, [page], picture)
    once = page.read_text()
    assert "old" not in once
    assert "| r2r |" in once
    assert once.startswith("before\n") and once.endswith("after\n")
    report.write(results, [page], picture)
    assert page.read_text() == once
    assert "<title>r2r, tokenflow: 1,000</title>" in picture.read_text()


def test_without_results_pages_stay_as_they_are(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- decode low -->\nold\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="no results"):
        report.write(Results(tmp_path / "none.json"), [page], tmp_path / "plot.svg")
    assert "old" in page.read_text()


def test_every_table_has_its_mark_in_the_page_and_the_readme_has_the_summary(results: Results) -> None:
    page, readme = (
        re.findall(r"<!-- (?!end)([a-z0-9 ]+) -->", page.read_text(encoding="utf-8")) for page in report.PAGES
    )
    assert sorted(page) == sorted(report.blocks(results))
    assert readme == ["summary"]


def test_the_pages_and_the_plot_show_the_results_that_are_kept(tmp_path: Path) -> None:
    copies = [tmp_path / page.name for page in report.PAGES]
    for page, copy in zip(report.PAGES, copies, strict=True):
        copy.write_bytes(page.read_bytes())
    report.write(Results(RESULTS), copies, tmp_path / "plot.svg")
    for page, copy in zip((*report.PAGES, report.PLOT), (*copies, tmp_path / "plot.svg"), strict=True):
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_what_is_there_is_not_planned_again_and_systems_take_turns(results: Results) -> None:
    turns = [turn for group in planned([ALONE, LOW], SYSTEMS, 3, results) for turn in group]
    assert not any(results.has(turn.cell.name, turn.system.name, turn.repetition) for turn in turns)
    of_low = [(turn.repetition, turn.system.name) for turn in turns if turn.cell == LOW]
    assert of_low == [(repetition, SYSTEMS[4].name) for repetition in range(3)]
    fresh = planned([ALONE, LOW], SYSTEMS[:2], 2, Results(Path("none.json")))
    assert [[(turn.cell, turn.repetition, turn.system) for turn in group] for group in fresh] == [
        [(cell, repetition, system) for repetition in (0, 1) for system in SYSTEMS[:2]]
        for cell in (ALONE, LOW)
    ]
