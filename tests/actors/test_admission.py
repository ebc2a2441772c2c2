"""What waits is counted when it comes, and refused when too much would wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.actors.admission import Admission, QueueLimits
from tokenflow.errors import Overloaded


def full(requests: int) -> Admission:
    """A door behind which no memory is free."""
    return Admission(QueueLimits(requests, tokens=100), lambda: 0)


def come(door: Admission, request: int, tokens: int) -> None:
    """A request comes alone."""
    with door.reserve() as reservation:
        door.queue(request, tokens, reservation)


def test_a_burst_is_refused_before_its_prompts_are_read() -> None:
    door = full(requests=2)
    with door.reserve(), door.reserve():
        with pytest.raises(Overloaded) as caught, door.reserve():
            pass
        assert str(caught.value) == "2 requests wait, and no more may (max_queued_requests); try again later"
    with door.reserve():
        pass


def test_what_can_begin_at_once_does_not_wait() -> None:
    free = 3
    door = Admission(QueueLimits(requests=1, tokens=100), lambda: free)
    with door.reserve(), door.reserve(), door.reserve():
        with door.reserve() as last:
            with pytest.raises(Overloaded), door.reserve():
                pass
            free = 0
            door.queue(1, 10, last)
        with pytest.raises(Overloaded), door.reserve():
            pass
    free = 9
    with pytest.raises(Overloaded), door.reserve():
        pass
    door.leave(1)
    with door.reserve():
        pass


def test_requests_that_come_together_are_let_in_together() -> None:
    door = full(requests=2)
    with door.reserve(50) as many:
        with pytest.raises(Overloaded), door.reserve():
            pass
        for request in range(50):
            door.queue(request, 10, many)
        with pytest.raises(RuntimeError, match="taken"):
            door.queue(50, 10, many)
    with pytest.raises(Overloaded), door.reserve():
        pass
    for request in range(49):
        door.leave(request)
    with door.reserve(2) as two:
        door.queue(60, 90, two)
        with pytest.raises(Overloaded, match="max_queued_tokens"):
            door.queue(61, 1, two)


def test_a_place_becomes_one_in_the_queue_and_then_a_free_one() -> None:
    door = full(requests=1)
    come(door, 7, 10)
    with pytest.raises(Overloaded), door.reserve():
        pass
    door.leave(7)
    door.leave(7)
    with door.reserve():
        pass


def test_a_prompt_that_is_never_read_gives_its_place_back() -> None:
    door = full(requests=1)
    with pytest.raises(ValueError, match="no prompt"), door.reserve():
        raise ValueError("no prompt")
    with door.reserve():
        pass


def test_prompts_that_wait_are_bounded_together_but_a_long_one_alone_may_come() -> None:
    door = full(requests=9)
    come(door, 1, 150)
    with pytest.raises(Overloaded) as caught:
        come(door, 2, 1)
    assert str(caught.value) == (
        "150 prompt tokens wait, and with these 1 they would be more than 100 (max_queued_tokens); "
        "try again later"
    )
    door.leave(1)
    come(door, 2, 60)
    come(door, 3, 40)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60))))
def test_no_order_of_coming_and_going_slips_past_the_limits(moves: list[tuple[int, int]]) -> None:
    door, waiting = full(requests=3), dict[int, int]()
    for request, tokens in moves:
        if request in waiting:
            door.leave(request)
            del waiting[request]
            continue
        try:
            come(door, request, tokens)
        except Overloaded:
            assert len(waiting) == 3 or sum(waiting.values()) + tokens > 100
        else:
            waiting[request] = tokens
            assert len(waiting) <= 3
            assert len(waiting) == 1 or sum(waiting.values()) <= 100
