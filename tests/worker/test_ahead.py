"""A worker that goes on by itself: which rows, how far, and that it stops when it is told something."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.recipes import ENGINE
from tests.toy.engine import toy_logits
from tokenflow.types import ModelConfig, SamplingParams
from tokenflow.wire.ahead import next_step
from tokenflow.wire.channel import FrameReader, decode_to_router, encode
from tokenflow.wire.messages import (
    VERSION,
    Claim,
    Grant,
    Hello,
    Hold,
    Open,
    Row,
    RowDone,
    RowFailed,
    Step,
    StepDone,
    Stop,
    ToRouter,
    ToWorker,
)
from tokenflow.worker.ahead import Ahead
from tokenflow.worker.loop import serve

EOS = 2
HELLO = Hello(VERSION, "toy", 1, ModelConfig(path=""), (), (), 128, (EOS,))


def opened(handle: int, **sampling: object) -> Open:
    return Open(handle, 0, 1, 7, SamplingParams(**sampling), ())  # type: ignore[arg-type]


def step(*rows: Row, least: int = 1, **sampling: object) -> Step:
    return Step(5, [], [opened(row.handle, **sampling) for row in rows], [], list(rows), least)


def done(*rows: RowDone, failed: tuple[RowFailed, ...] = ()) -> StepDone:
    return StepDone(5, list(rows), list(failed), 0.0, 0.0, 0.0, 1, 0)


def handles(asked: Step, answer: StepDone) -> list[int]:
    ahead = Ahead(HELLO)
    ahead.told(asked)
    return ahead.handles(asked, answer)


FAR, NEAR = Row(4, 0, 0, [9], 0, ahead=3), Row(6, 0, 0, [9], 0, ahead=0)


def test_a_row_that_stays_may_run_again() -> None:
    assert handles(step(FAR), done(RowDone(4, 0, 1, 50))) == [4]


def test_a_row_that_leaves_or_is_over_does_not_keep_the_others() -> None:
    rows = [Row(handle, 0, 0, [9], 0, ahead=3) for handle in (1, 2, 3)]
    answer = done(RowDone(1, 0, 1, 50, 0, 2), RowDone(2, 0, 1, EOS), RowDone(3, 0, 1, 51))
    assert handles(step(*rows), answer) == [3]


def test_a_row_goes_no_further_than_it_was_let() -> None:
    assert handles(step(FAR, NEAR), done(RowDone(4, 0, 1, 50), RowDone(6, 0, 1, 50))) == [4]


def test_a_stop_token_of_the_request_ends_it_and_an_ignored_end_does_not() -> None:
    assert handles(step(FAR, stop_token_ids=(50,)), done(RowDone(4, 0, 1, 50))) == []
    assert handles(step(FAR, ignore_eos=True), done(RowDone(4, 0, 1, EOS))) == [4]


@pytest.mark.parametrize("least", [0, 2])
def test_too_few_rows_wait_for_the_router(least: int) -> None:
    assert handles(step(FAR, least=least), done(RowDone(4, 0, 1, 50))) == []


def test_the_router_decides_after_a_failure_and_about_an_unfinished_prompt() -> None:
    failure = RowFailed(6, 0, 1, "RouteFailed", "why")
    assert handles(step(FAR, FAR), done(RowDone(4, 0, 1, 50), failed=(failure,))) == []
    assert handles(step(FAR, FAR), done(RowDone(4, 0, 1, 50), RowDone(4, 0, 1, -1))) == []


def test_the_next_step_extends_what_stays_by_its_own_tokens() -> None:
    answer = done(RowDone(4, 0, 1, 50), RowDone(6, 0, 1, 51))
    assert next_step(step(FAR, NEAR), answer, [4]) == Step(
        6, [], [], [], [Row(4, 0, 1, [50], 1, ahead=2)], least=1
    )


class Router:
    """The router's end of a worker in a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()
        self._messages: list[ToRouter] = []

    def send(self, *messages: ToWorker) -> None:
        self._socket.sendall(b"".join(map(encode, messages)))

    def receive(self) -> ToRouter:
        while not self._messages:
            data = self._socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._messages += map(decode_to_router, self._reader.feed(data))
        return self._messages.pop(0)

    def steps(self) -> list[StepDone]:
        """Answers up to the first after which the worker waits."""
        answers: list[StepDone] = []
        while not answers or answers[-1].ahead:
            answer = self.receive()
            assert isinstance(answer, StepDone)
            answers.append(answer)
        return answers


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    thread = Thread(target=serve, args=(theirs,))
    thread.start()
    router = Router(ours)
    config = ModelConfig(path=str(tmp_path), engine=ENGINE)
    router.send(Hello(VERSION, "toy", 1, config, (), (), 128, (EOS,)))
    assert isinstance(router.receive(), Claim)
    router.send(Grant(None))
    router.receive()
    yield router
    router.send(Stop())
    thread.join(30)
    assert not thread.is_alive()
    ours.close()
    theirs.close()


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, 128, 0).argmax()))
    return tokens[len(prompt) :]


def test_tokens_that_a_worker_gives_itself_are_those_that_it_would_be_given(router: Router) -> None:
    router.send(step(Row(4, 0, 0, [1, 40], 0, ahead=5), ignore_eos=True))
    answers = router.steps()
    assert [answer.id for answer in answers] == [5, 6, 7, 8, 9, 10]
    assert [answer.ahead for answer in answers] == [[4]] * 5 + [[]]
    assert [answer.rows[0].token for answer in answers] == greedy([1, 40], 6)
    assert [answer.rows[0].position for answer in answers] == [2, 3, 4, 5, 6, 7]
    router.send(Step(11, [], [], [], [Row(4, 0, 7, [greedy([1, 40], 6)[-1]], 6)]))
    assert router.steps()[0].rows[0].token == greedy([1, 40], 7)[-1]


def test_a_worker_that_is_told_to_wait_does(router: Router) -> None:
    router.send(step(Row(4, 0, 0, [1, 40], 0, ahead=10_000), ignore_eos=True))
    first = router.receive()
    router.send(Hold())
    answers = router.steps()
    assert isinstance(first, StepDone)
    assert first.ahead and not answers[-1].ahead
    assert len(answers) < 9_000


def test_a_hold_that_comes_too_late_holds_nothing(router: Router) -> None:
    router.send(step(Row(4, 0, 0, [1, 40], 0, ahead=1), ignore_eos=True))
    assert len(router.steps()) == 2
    router.send(Hold(), Step(7, [], [], [], [Row(4, 0, 3, greedy([1, 40], 2)[1:], 2, ahead=1)], 1))
    assert len(router.steps()) == 2


def test_a_message_that_waits_is_read_before_the_next_step(router: Router) -> None:
    """Both are there before the first step ends, so there is no second."""
    router.send(
        step(Row(4, 0, 0, [1, 40], 0, ahead=9), ignore_eos=True),
        Step(6, [4], [], [], []),
    )
    assert [len(answer.rows) for answer in (*router.steps(), *router.steps())] == [1, 0]
