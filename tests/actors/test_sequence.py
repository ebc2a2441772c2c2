"""What a request knows of itself while tokens are committed and it moves between models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenflow.actors.sequence import Limits, Phase, Sequence
from tokenflow.errors import RequestCancelled
from tokenflow.types import SamplingParams
from tokenflow.wire.messages import RowDone

SLM, LLM = 1, 2
EOS = 9


class Ear:
    """A listener that ends the response at chosen tokens and notes what it was told."""

    def __init__(self, ends_at: tuple[int, ...] = ()) -> None:
        self.heard: list[int] = []
        self.woken: list[Phase] = []
        self._ends_at = ends_at

    def committed(self, token: int) -> bool:
        self.heard.append(token)
        return token in self._ends_at

    def wake(self, sequence: Sequence) -> None:
        self.woken.append(sequence.phase)


def request(ear: Ear, max_tokens: int = 100) -> Sequence:
    limits = Limits(max_tokens, frozenset({EOS}))
    return Sequence(1, [5, 6, 7], SamplingParams(), 0, (), limits, ear, SLM)


def done(token: int, logprob: float | None = None) -> RowDone:
    return RowDone(1, 0, 3, token, logprob=logprob, top=[(token, -0.5)] if logprob else [])


def test_a_commit_records_the_token_its_writer_and_what_was_reported_of_it() -> None:
    sequence = request(Ear())
    assert sequence.prompt_tokens == 3
    assert sequence.commit(SLM, done(1)) is None
    assert sequence.commit(LLM, done(2, -0.25)) is None
    assert sequence.tokens == [5, 6, 7, 1, 2]
    assert sequence.writers == [SLM, LLM]
    assert sequence.logprobs == [None, -0.25]
    assert sequence.tops == [[], [(2, -0.5)]]
    assert sequence.output_tokens == 2


def test_the_first_token_is_timed_once() -> None:
    sequence = request(Ear())
    sequence.commit(SLM, done(1))
    first = sequence.first_token_at
    assert first >= sequence.submitted_at
    sequence.commit(SLM, done(2))
    assert sequence.first_token_at == first


def test_a_stop_token_ends_the_response_and_is_not_read_as_text() -> None:
    ear = Ear()
    sequence = request(ear)
    assert sequence.commit(SLM, done(EOS)) == "stop"
    assert sequence.tokens[-1] == EOS
    assert ear.heard == []


def test_a_token_whose_text_ends_the_response_stops_it() -> None:
    assert request(Ear(ends_at=(4,))).commit(SLM, done(4)) == "stop"


def test_the_last_allowed_token_ends_the_response_by_length() -> None:
    sequence = request(Ear(), max_tokens=2)
    assert sequence.commit(SLM, done(1)) is None
    assert sequence.commit(SLM, done(2)) == "length"


def test_a_stop_token_at_the_last_allowed_position_counts_as_a_stop() -> None:
    assert request(Ear(), max_tokens=1).commit(SLM, done(EOS)) == "stop"


def test_a_commit_forgets_who_gave_the_position_up() -> None:
    sequence = request(Ear())
    sequence.gave_up.add((SLM, 0))
    sequence.commit(LLM, done(1))
    assert sequence.gave_up == set()


def test_a_move_keeps_who_gave_the_position_up() -> None:
    sequence = request(Ear())
    sequence.gave_up.add((SLM, 0))
    sequence.move(LLM)
    assert sequence.gave_up == {(SLM, 0)}


@given(st.lists(st.integers(1, 4) | st.just(None), max_size=30))
def test_the_run_length_counts_commits_since_the_last_move(steps: list[int | None]) -> None:
    """A number moves the request to that model, ``None`` commits a token where it is."""
    sequence = request(Ear())
    expected_run, moves, holder = 0, 0, SLM
    told: dict[int, int] = {}
    for step in steps:
        if step is None:
            sequence.commit(sequence.holder, done(1))
            expected_run += 1
        else:
            told[holder] = told[step] = 3 + sequence.output_tokens
            sequence.move(step)
            holder, expected_run, moves = step, 0, moves + 1
        assert sequence.run_length == expected_run
        assert (sequence.holder, sequence.handoffs) == (holder, moves)
        assert sequence.seen == told


def test_the_end_is_final_and_told() -> None:
    ear = Ear()
    sequence = request(ear)
    error = RequestCancelled("x")
    sequence.end(None, error)
    assert (sequence.phase, sequence.error, sequence.finish_reason) == (Phase.FINISHED, error, None)
    assert sequence.finished_at >= sequence.submitted_at
    assert ear.woken == [Phase.FINISHED]


def test_requests_are_told_apart_by_identity() -> None:
    ear = Ear()
    assert len({request(ear), request(ear)}) == 2
