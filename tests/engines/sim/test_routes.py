"""Simulated routes: drawn by shares, or those of recorded responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenflow.engines.sim.routes import Drawn, Recorded, read_trace
from tokenflow.errors import ModelLoadError
from tokenflow.types import SamplingParams
from tokenflow.wire.messages import Destination, Open

DROPS = Destination(2, "llm", 0.5, -1, 0, False)
KEEPS = Destination(1, "slm", 1.0, -1, 0, True)


def request(seed: int, params: tuple[float, ...] = (), choice: int = 0) -> Open:
    return Open(1, 0, 3, seed, SamplingParams(choice=choice), params)


def replay(trace: list[list[str]], seed: int, choice: int = 0) -> tuple[list[tuple[str, int]], list[str]]:
    """The visits (model, position) of a request between two models, and who wrote each token."""
    routes = {"slm": Recorded("slm", (DROPS,), trace), "llm": Recorded("llm", (KEEPS,), trace)}
    at, position, visits, written = "slm", 0, [], []
    while True:
        visits.append((at, position))
        to, last = routes[at].visit(request(seed, choice=choice), position)
        if to is None or to.keep:
            written.append(at)
            position += 1
            if last:
                return visits, written
        at = at if to is None else to.name


TRACE = [
    ["slm", "slm", "llm", "llm", "slm"],
    ["llm", "slm"],
    ["slm"],
    ["slm", "llm"],
]


@pytest.mark.parametrize("seed", range(4))
def test_a_recorded_response_is_written_by_the_same_models_again(seed: int) -> None:
    assert replay(TRACE, seed)[1] == TRACE[seed]
    assert replay(TRACE, seed + len(TRACE))[1] == TRACE[seed]
    assert replay(TRACE, seed, choice=1)[1] == TRACE[(seed + 1) % len(TRACE)]


def test_a_token_is_given_up_where_the_next_writer_is_reached_by_dropping_it() -> None:
    assert replay(TRACE, 0)[0] == [
        ("slm", 0), ("slm", 1), ("slm", 2), ("llm", 2), ("llm", 3), ("slm", 4),
    ]  # fmt: skip


def test_a_change_of_writers_that_no_rule_makes_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="response 0 of the trace goes from 'slm' to 'mid'"):
        Recorded("slm", (DROPS,), [["slm", "mid"]])
    Recorded("llm", (KEEPS,), [["slm", "mid"]])


def test_a_share_may_come_from_the_request() -> None:
    routes = Drawn(1, (Destination(2, "llm", 0.0, 1, 0, False),))
    assert all(routes.visit(request(seed, (0.0, 1.0)), 0).to for seed in range(50))
    assert not any(routes.visit(request(seed, (1.0, 0.0)), 0).to for seed in range(50))


def test_several_destinations_share_the_steps() -> None:
    mid = Destination(3, "mid", 0.3, -1, 1, True)
    routes = Drawn(1, (DROPS, mid))
    went = [routes.visit(request(seed), 5).to for seed in range(3000)]
    assert went.count(DROPS) / 3000 == pytest.approx(0.5, abs=0.03)
    assert went.count(mid) / 3000 == pytest.approx(0.3, abs=0.03)


def test_models_and_positions_draw_independently() -> None:
    def bits(code: int, position: int) -> list[bool]:
        return [Drawn(code, (DROPS,)).visit(request(seed), position).to is None for seed in range(400)]

    for other in (bits(2, 0), bits(1, 1)):
        agree = sum(a == b for a, b in zip(bits(1, 0), other, strict=True))
        assert 140 < agree < 260


def test_a_trace_is_what_the_command_line_writes(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    rows = [
        {"tokens": [{"id": 1, "model": "slm"}, {"id": 2, "model": "llm"}]},
        {"error": {"type": "ContextTooLong"}},
        {"tokens": []},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_trace(file) == [["slm", "llm"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no response"),
        ('{"error": {}}\n', "holds no response"),
        ("not json\n", r"out.jsonl:1: expected a line that tokenflow run --output wrote"),
        ('{"tokens": [{"model": "a"}]}\n{"tokens": [{"id": 1}]}\n', r"out.jsonl:2: expected a line"),
        ("[]\n", r"out.jsonl:1: expected"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        read_trace(file)


def test_a_trace_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_trace(tmp_path / "gone.jsonl")
