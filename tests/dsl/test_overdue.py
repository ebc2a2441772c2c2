"""Functions that take too long, seen from outside."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from tokenflow.dsl import overdue

NAME = "send of model 'slm'"


@pytest.fixture(autouse=True)
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "HELD_UP_S", 0.1)
    monkeypatch.setattr(overdue, "_ended_at", [])
    overdue.prepare()


def until_spoken_of(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    def function() -> str:
        while not caplog.records:
            pass
        return "done"

    return function


def test_a_function_that_returns_in_time_is_called_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    assert overdue.call(NAME, 10.0, lambda a, b: a + b, 2, 3) == 5
    with pytest.raises(KeyError):
        overdue.call(NAME, 10.0, {}.__getitem__, "x")
    assert caplog.records == []


def test_a_function_that_returns_late_gives_its_answer_and_signals_mean_what_they_did(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert overdue.call(NAME, 60.0, until_spoken_of(caplog)) == "done"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"{NAME} holds up the event loop and all requests, for ")
    assert line.endswith("it is ended after 60 s")


def test_a_signal_ends_the_function_and_reaches_who_waited_for_it(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def function() -> None:
        until_spoken_of(caplog)()
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("goes on")

    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(overdue.TookTooLong, match=r"^SIGTERM ended it after [0-9]+\.[0-9] s$"):
            overdue.call(NAME, 60.0, function)
        assert heard == [signal.SIGTERM]
        # The others of its batch would keep the signal from being heard just so.
        with pytest.raises(overdue.TookTooLong, match=r"^it was not called, because the process is to end$"):
            overdue.call(NAME, 60.0, pytest.fail)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_function_whose_time_is_up_is_ended_though_it_catches_every_exception() -> None:
    def function() -> None:
        while True:
            try:
                threading.Event().wait(60)
            except Exception:
                pytest.fail("caught")

    with pytest.raises(overdue.TookTooLong, match=r"^it had not returned after 0\.5 s$"):
        overdue.call(NAME, 0.5, function)


def test_a_function_that_catches_all_there_is_in_a_loop_is_ended_all_the_same() -> None:
    caught: list[object] = []

    def function() -> None:
        while True:
            try:
                threading.Event().wait(60)
            except:  # noqa: E722
                caught.append(1)

    tracer = sys.gettrace()
    with pytest.raises(overdue.TookTooLong, match=r"^it had not returned after 0\.5 s$"):
        overdue.call(NAME, 0.5, function)
    assert caught == [1]
    assert sys.gettrace() is tracer
    assert overdue.call(NAME, 10.0, lambda: sum(range(9))) == 36


def test_a_signal_ends_a_function_that_catches_all_there_is(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def function() -> None:
        until_spoken_of(caplog)()
        while True:
            try:
                if not heard:
                    signal.raise_signal(signal.SIGTERM)
                threading.Event().wait(60)
            except:  # noqa: E722
                pass

    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(overdue.TookTooLong, match=r"^SIGTERM ended it after [0-9]+\.[0-9] s$"):
            overdue.call(NAME, 60.0, function)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_there_is_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(overdue.call(NAME, 0.2, until_spoken_of(caplog))))
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert answers == ["done"]
    (record,) = caplog.records
    assert record.message.endswith("nothing can end it")
