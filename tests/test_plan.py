"""``tokenflow plan`` as a user sees it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenflow import calibrate, chart, cli
from tokenflow.chart import Chart, Line, as_svg, as_text, write_chart
from tokenflow.dsl.load import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
SIM = str(RECIPES / "sim.yaml")


def plan(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    assert cli.main(["plan", *argv]) == code
    out, err = capsys.readouterr()
    return out, err


def test_the_paper_s_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """TokenRouter, arXiv 2610.12242: B = 2, 2, 3 at N = 2, 3, 4."""
    out, _ = plan(capsys, SIM, "--concurrency", "2,3,4")
    lines = out.splitlines()
    assert lines[0] == "sim (simulated), as the recipe says:"
    assert lines[1] == "  slm  a step takes 6 ms; 65% stay, 35% to llm"
    rows = [line.split() for line in lines if line[:1].isdigit() and "thresholds" in line]
    assert [(row[0], row[5], row[6]) for row in rows] == [
        ("2", "2", "110.3"),
        ("3", "2", "158.1"),
        ("4", "3", "208.0"),
    ]
    assert "N = 4: tokens/s by the threshold of llm" in lines
    drawn = lines[lines.index("N = 4: tokens/s by the threshold of llm") + 1 :][:4]
    assert [line.split()[-1] for line in drawn] == ["187.2", "195.4", "208.0", "190.7"]
    assert [("★" in line) for line in drawn] == [False, False, True, False]


def test_everything_is_there_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = plan(capsys, SIM, "--concurrency", "4", "--json", "--set", "params.p=0.35")
    data = json.loads(out)
    assert (data["recipe"], data["simulated"], data["measured"]) == ("sim", True, False)
    assert data["models"][0]["routing"] == {"slm": 0.65, "llm": 0.35}
    [found] = data["plans"]
    assert found["thresholds"] == {"slm": 1, "llm": 3}
    assert found["tokens_per_s"] == pytest.approx(207.95, abs=0.05)
    assert found["gain_over_eager"] == pytest.approx(0.111, abs=0.001)
    assert found["lookahead"]["tokens_per_s"] >= found["tokens_per_s"]
    assert {"thresholds": {"slm": 1, "llm": 4}, "method": "exact"}.items() <= next(
        row for row in found["table"] if row["thresholds"]["llm"] == 4
    ).items()


def test_other_values_are_planned_with_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = plan(
        capsys, SIM, "--concurrency", "2", "--json", "--set", "models.llm.latency_ms={1: 10, 2: 14}"
    )
    assert json.loads(out)["models"][1]["latency_ms"] == {"1": 10.0, "2": 14.0}


@pytest.mark.parametrize("name", ["plan.svg", "plan.html", "plan.png"])
def test_throughput_is_drawn_into_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    if name.endswith("png"):
        pytest.importorskip("matplotlib")
    target = tmp_path / name
    _, err = plan(capsys, SIM, "--concurrency", "2,4", "--plot", str(target))
    assert f"{target}: written" in err
    data = target.read_bytes()
    if name.endswith("png"):
        assert data.startswith(b"\x89PNG")
    else:
        assert b"N = 4" in data and b"simulated" in data and b"<svg" in data


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--concurrency", "2", "--plot", "x.pdf"), "charts are written to .png, .html or .svg files"),
        (("--concurrency", "2", "--plot", "nowhere/x.svg"), "nowhere/x.svg: there is no directory 'nowhere'"),
        (("--concurrency", "2", "--input", "x.txt"), "--input gives the prompts of --measure"),
        (("--concurrency", "1000000"), "concurrency must be an integer from 1 to 1,024, got 1000000"),
        (("--concurrency", "2", "--set", "params.p=2"), "expected a share from 0 to 1, but p is 2"),
        (("--concurrency", "2", "--set", "models.slm.latency_ms=-1"), "a step takes more than 0 ms"),
    ],
)
def test_what_cannot_be_planned_is_said(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    _, err = plan(capsys, SIM, *argv, code=2)
    assert message in err


@pytest.mark.parametrize("text", ["0", "-2", "2,", "a", "1.5", ""])
def test_a_concurrency_is_a_whole_number(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", SIM, f"--concurrency={text}"])
    assert caught.value.code == 2
    assert "must be whole numbers of at least 1, as in 4 or 1,2,4" in capsys.readouterr().err


def test_a_recipe_that_says_too_little_is_to_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = plan(capsys, str(RECIPES / "r_stitch.yaml"), "--concurrency", "2", code=2)
    assert "does not say how long a step of slm takes" in err
    assert "tokenflow plan --measure" in err


def test_png_without_matplotlib_is_refused_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        chart.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    _, err = plan(capsys, SIM, "--concurrency", "2", "--plot", "x.png", code=2)
    assert "pip install 'tokenflow[plot]'; or give a .html file" in err


def test_what_is_measured_can_be_pasted_into_the_recipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fast = ["--set", "models.slm.latency_ms=1", "--set", "models.llm.latency_ms=4"]
    out, err = plan(capsys, SIM, "--concurrency", "4", "--measure", "--seconds", "3", *fast)
    assert "measuring for 3 s" in err
    assert out.startswith("sim (simulated), measured:")
    said = yaml.safe_load(out[out.index("batching:") :])
    written: dict[str, Any] = {**yaml.safe_load(Path(SIM).read_text()), **said}
    recipe = load_recipe(written)
    assert recipe.batching.policy == "planned"
    assert recipe.batching.assume.routing["slm"]["llm"] == pytest.approx(0.35, abs=0.08)
    assert recipe.batching.assume.latency_ms["llm"][0][1] >= 4


def test_prompts_for_measuring_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert calibrate._read(str(file)) == ["hi", [{"role": "user", "content": "hi"}]]
    file.write_text("\n")
    with pytest.raises(Exception, match="holds no prompt"):
        calibrate._read(str(file))


def test_a_line_of_equal_values_is_drawn_on_the_left() -> None:
    assert as_text(Line("", {1: 2.0, 10: 2.0}, marked=10), width=4) == [" 1 ┤●    2.0", "10 ┤★    2.0"]


def test_an_svg_has_every_line_with_its_name() -> None:
    lines = [Line("a < b", {1: 1.0, 2: 5.0}, marked=2), Line("c", {1: 2.0, 3: 0.5}, dashed=True)]
    svg = as_svg(Chart("title", "x", "y", lines))
    assert svg.count("<polyline") == 2
    assert "a &lt; b" in svg
    assert svg.count("stroke-dasharray") == 2


def test_a_chart_needs_a_known_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not to 'x\.txt'"):
        write_chart([], tmp_path / "x.txt", "")
