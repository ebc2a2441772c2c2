"""What is measured of a closed loop."""

from __future__ import annotations

import asyncio

import pytest

from bench.compare.load import Emit, Record, closed_loop, measure

pytestmark = pytest.mark.anyio


def record(submitted: float, times: list[float], warm: float | None, finished: float | None) -> Record:
    return Record(0, 2, submitted, times, [1] * len(times), [0] * len(times), warm, finished)


def test_decoding_is_the_time_in_which_all_requests_in_flight_are_warm() -> None:
    first = record(0.0, [1.0, 2.0, 3.0, 4.0, 5.0], 2.0, 5.0)
    second = record(0.0, [2.5, 3.5, 4.5, 5.5, 6.5], 3.5, 6.5)
    figures = measure(8.0, [first, second], 2)
    assert figures.decode_s == 1.5  # from 3.5, when the second is warm, to 5.0, when the first ends
    assert figures.decode == pytest.approx(3 / 1.5)  # at 4.0, 4.5 and 5.0
    assert figures.end_to_end == 10 / 8.0
    assert figures.ttft_s == [1.0, 2.5]
    assert figures.latency_s == [5.0, 6.5]


def test_a_system_that_takes_one_request_at_a_time_is_judged_by_that_one() -> None:
    first = record(0.0, [1.0, 2.0, 3.0], 1.0, 3.0)
    second = record(0.0, [4.0, 5.0, 6.0], 4.0, 6.0)
    figures = measure(6.0, [first, second], 1)
    assert (figures.decode_s, figures.decode) == (4.0, 1.0)


def test_a_request_that_was_cut_counts_with_what_it_has() -> None:
    figures = measure(4.0, [record(0.0, [1.0, 2.0, 3.0], 1.0, None), record(0.0, [], None, None)], 1)
    assert (figures.tokens, figures.finished) == (3, 0)
    assert (figures.decode_s, figures.decode) == (3.0, 2 / 3.0)


def test_without_a_time_in_which_all_are_warm_there_is_no_decode_throughput() -> None:
    assert measure(4.0, [record(0.0, [1.0], None, 1.0)], 1).decode == 0.0


def test_a_record_is_warm_once_every_model_of_its_trace_has_written() -> None:
    made = Record(0, 2, 0.0)
    made.emit(5, 0)
    made.emit(5, 0)
    assert made.warm is None
    made.emit(5, 1)
    assert made.warm == made.times[2]
    made.emit(5, 0)
    assert made.warm == made.times[2]


async def test_so_many_requests_are_in_flight_until_all_are_answered() -> None:
    running = most = 0

    async def generate(index: int, emit: Emit) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        emit(index, 0)
        running -= 1

    _, records = await closed_loop(generate, [(index, 1) for index in range(10)], 3, limit_s=60)
    assert most == 3
    assert sorted(made.tokens[0] for made in records) == list(range(10))
    assert all(made.finished is not None and made.warm is not None for made in records)


async def test_what_is_not_answered_in_time_is_cut() -> None:
    async def generate(index: int, emit: Emit) -> None:
        emit(index, 0)
        if index:
            await asyncio.Event().wait()

    elapsed, records = await closed_loop(generate, [(0, 1), (1, 1), (2, 1)], 2, limit_s=0.05)
    assert elapsed >= 0.05
    assert [made.finished is not None for made in records] == [True, False, False]


async def test_a_failure_is_not_taken_for_an_answer() -> None:
    async def generate(index: int, emit: Emit) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await closed_loop(generate, [(0, 1)], 1, limit_s=60)
