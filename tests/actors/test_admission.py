"""What waits is counted when it comes, and refused when too much would wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.actors.admission import Admission, QueueLimits
from tokenflow.errors import Overloaded


def test_a_burst_is_refused_before_its_prompts_are_read() -> None:
    door = Admission(QueueLimits(requests=2, tokens=100))
    with door.arriving(), door.arriving():
        with pytest.raises(Overloaded) as caught, door.arriving():
            pass
        assert str(caught.value) == (
            "2 requests wait, and no more than 2 may (max_queued_requests); try again later"
        )
    with door.arriving():
        pass


def test_a_place_becomes_one_in_the_queue_and_then_a_free_one() -> None:
    door = Admission(QueueLimits(requests=1, tokens=100))
    with door.arriving():
        door.queue(7, 10)
    with pytest.raises(Overloaded), door.arriving():
        pass
    door.leave(7)
    door.leave(7)
    with door.arriving():
        pass


def test_a_prompt_that_is_never_read_gives_its_place_back() -> None:
    door = Admission(QueueLimits(requests=1, tokens=100))
    with pytest.raises(ValueError, match="no prompt"), door.arriving():
        raise ValueError("no prompt")
    with door.arriving():
        pass


def test_prompts_that_wait_are_bounded_together_but_a_long_one_alone_may_come() -> None:
    door = Admission(QueueLimits(requests=9, tokens=100))
    door.queue(1, 150)
    with pytest.raises(Overloaded) as caught:
        door.queue(2, 1)
    assert str(caught.value) == (
        "150 prompt tokens wait, and with these 1 they would be more than 100 (max_queued_tokens); "
        "try again later"
    )
    door.leave(1)
    door.queue(2, 60)
    door.queue(3, 40)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60))))
def test_no_order_of_coming_and_going_slips_past_the_limits(moves: list[tuple[int, int]]) -> None:
    door, waiting = Admission(QueueLimits(requests=3, tokens=100)), dict[int, int]()
    for request, tokens in moves:
        if request in waiting:
            door.leave(request)
            del waiting[request]
            continue
        try:
            with door.arriving():
                door.queue(request, tokens)
        except Overloaded:
            assert len(waiting) == 3 or sum(waiting.values()) + tokens > 100
        else:
            waiting[request] = tokens
            assert len(waiting) <= 3
            assert len(waiting) == 1 or sum(waiting.values()) <= 100
