"""Traces are read, cut into calls and made longer rightly."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.compare import traces, work
from bench.compare.record import trace_of
from bench.compare.traces import Run

EXAMPLE = "AAaBAcB"


def is_route(trace: str) -> bool:
    """A dropped token's position goes to another model, and the last token is kept."""
    return trace[-1].isupper() and all(a.isupper() or a != b.lower() for a, b in pairwise(trace))


def test_a_trace_says_who_wrote_what() -> None:
    assert traces.kept(EXAMPLE) == 5
    assert traces.writers(EXAMPLE) == [0, 0, 1, 0, 1]
    assert list(traces.runs(EXAMPLE)) == [
        Run(0, 2, True),
        Run(1, 1, False),
        Run(0, 1, False),
        Run(2, 0, True),
        Run(1, 1, False),
    ]


def test_a_response_is_called_for_by_visits_or_by_tokens() -> None:
    assert traces.calls("AAa", "visit") == [Run(0, 2, True)]
    assert traces.calls("AAa", "token") == [Run(0, 1, False), Run(0, 1, False), Run(0, 0, True)]


def test_a_token_was_kept_if_nobody_sampled_its_position_again() -> None:
    samples = [("a", 7), ("a", 8), ("b", 8), ("a", 9), ("a", 10), ("c", 10), ("b", 10)]
    assert trace_of(samples) == "AaBAacB"


@given(
    st.lists(st.text("Aa", min_size=1).map(lambda text: text.replace("a", "aB") + "A"), min_size=1),
    st.integers(1, 300),
    st.integers(0, 9),
)
def test_a_scaled_trace_has_the_length_asked_for_and_is_a_route(
    recorded: list[str], tokens: int, seed: int
) -> None:
    scaled = traces.scale(recorded, tokens, seed)
    assert traces.kept(scaled) == tokens
    assert scaled[0].lower() == "a"
    assert is_route(scaled)
    assert scaled == traces.scale(recorded, tokens, seed)


def test_an_ensembles_trace_starts_at_the_first_model_when_it_is_scaled() -> None:
    assert traces.scale(["BCAB"], 4, 0) == "ABAB"


def test_what_was_recorded_are_routes_of_all_five_algorithms() -> None:
    recorded = traces.load()
    assert list(recorded) == list(traces.ALGORITHMS)
    for name, listed in recorded.items():
        assert len(listed) == 50
        assert all(is_route(trace) for trace in listed)
        models = {model for trace in listed for model in traces.writers(trace)}
        assert models == ({0, 1, 2} if name == "me" else {0, 1})


def test_traces_survive_being_written(tmp_path: Path) -> None:
    file = tmp_path / "traces.json.gz"
    traces.save(traces.load(), file)
    assert file.read_bytes() == traces.FILE.read_bytes()


@pytest.mark.parametrize("cell", [*work.full_table(), *work.quick_table()], ids=lambda cell: cell.name)
def test_every_cell_has_its_requests(cell: work.Cell) -> None:
    listed = work.requests(cell)
    assert len(listed) == cell.concurrency * cell.workload.rounds
    assert {traces.kept(request.trace) for request in listed} == {cell.workload.output}
    loaded = 1 if cell.algorithm == work.ALONE else len(cell.models.shapes)
    assert max(max(traces.writers(request.trace)) for request in listed) < loaded


def test_no_two_requests_share_the_beginning_of_a_prompt() -> None:
    prompts = [work.prompt(index, 100, salt) for index in range(64) for salt in ("", "0 visit", "1 token")]
    assert len({tuple(prompt[:2]) for prompt in prompts}) == len(prompts)
    assert all(2 <= token < work.VOCAB for prompt in prompts for token in prompt)


def test_a_twisted_prompt_differs_in_its_last_token_only() -> None:
    prompts = [work.prompt(3, 50, "salt", twist) for twist in range(3)]
    assert len({tuple(prompt[:-1]) for prompt in prompts}) == 1
    assert len({prompt[-1] for prompt in prompts}) == 3
    assert all(2 <= prompt[-1] < work.VOCAB for prompt in prompts)
