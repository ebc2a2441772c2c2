"""What HTTP costs is told apart from what the machine does meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from bench import server
from bench.server import Way, compared


def test_a_machine_that_becomes_slower_and_slower_changes_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ROUNDS", 4)
    asked: list[tuple[str, int, int]] = []

    def costs(name: str, seconds: float) -> Callable[[int, int], dict[str, float]]:
        def answer(concurrency: int, count: int) -> dict[str, float]:
            asked.append((name, concurrency, count))
            return {"tokens": 1000, "seconds": seconds * 1.02 ** len(asked)}

        return answer

    ways = {
        "in_process": Way(psutil.Process(), costs("in_process", 1.0)),
        "http": Way(psutil.Process(), costs("http", 1.25)),
    }
    result = compared(ways, 16, 200)
    assert [name[0] for name, _, count in asked if count == 200] == list("ihhiihhi")
    assert asked[:2] == [("in_process", 16, server.WARM_UP), ("http", 16, server.WARM_UP)]
    assert result["throughput_ratio"] == pytest.approx(0.8, rel=0.001)
    assert [round(ratio, 3) for ratio in result["throughput_ratios"]] == [0.784, 0.816, 0.784, 0.816]
    assert result["http"]["tokens_per_s"] < result["in_process"]["tokens_per_s"] < 1000
