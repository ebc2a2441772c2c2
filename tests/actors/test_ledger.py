"""The books of KV cache against a plain sum over what is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenflow.actors.ledger import Ledger, Pool

POOLS = st.dictionaries(
    st.sampled_from(["slm", "mid", "llm"]),
    st.builds(Pool, st.integers(1, 200), st.integers(1, 32), st.integers(1, 6)),
    min_size=1,
)
ACTIONS = st.lists(
    st.tuples(st.just("hold"), st.integers(0, 5), st.integers(0, 120))
    | st.tuples(st.just("release"), st.integers(0, 5), st.just(0)),
    max_size=40,
)


def fits(pools: dict[str, Pool], lengths: list[int]) -> bool:
    """Whether requests of these lengths fit every model, counted block by block."""
    return all(
        sum(-(-length // pool.block_size) for length in lengths) * pool.block_size <= pool.capacity
        for pool in pools.values()
    )


@given(pools=POOLS, actions=ACTIONS, next_length=st.integers(0, 120))
def test_the_books_equal_a_sum_over_what_is_held(
    pools: dict[str, Pool], actions: list[tuple[str, int, int]], next_length: int
) -> None:
    ledger = Ledger(pools)
    held: dict[int, int] = {}
    for action, request, length in actions:
        if action == "hold":
            ledger.hold(request, length)
            held[request] = length
        else:
            ledger.release(request)
            held.pop(request, None)
        lengths = list(held.values())
        assert len(ledger) == len(lengths)
        assert ledger.overdrawn == (not fits(pools, lengths))
        free_slot = len(lengths) < min(pool.slots for pool in pools.values())
        assert ledger.admits(next_length) == (free_slot and fits(pools, [*lengths, next_length]))


@given(
    pools=POOLS,
    others=st.lists(st.integers(1, 40), max_size=3),
    length=st.integers(1, 60),
    more=st.integers(0, 60),
    grown=st.integers(0, 60),
)
def test_what_is_reserved_is_booked_if_it_fits_and_growing_into_it_takes_nothing_more(
    pools: dict[str, Pool], others: list[int], length: int, more: int, grown: int
) -> None:
    ledger = Ledger(pools)
    for request, other in enumerate(others, 1):
        ledger.hold(request, other)
    ledger.hold(0, length)
    before = ledger.use()
    booked = ledger.reserve(0, length + more)
    wanted = Ledger(pools)
    for request, other in enumerate([length + more, *others]):
        wanted.hold(request, other)
    if wanted.use() == before or not wanted.overdrawn:
        assert booked >= length + more
        assert ledger.use() == wanted.use()
    else:
        assert booked < length + more
        assert ledger.use() == before
    assert booked >= length
    after = ledger.use()
    ledger.hold(0, min(length + grown, booked))
    assert ledger.use() == after
    ledger.release(0)
    for request, other in enumerate(others, 1):
        ledger.hold(request, other)
    assert len(ledger) == len(others)


@given(pools=POOLS)
def test_the_longest_request_fits_alone_and_one_token_more_does_not(pools: dict[str, Pool]) -> None:
    longest = Ledger(pools).longest
    assert fits(pools, [longest])
    assert not fits(pools, [longest + 1])
    assert Ledger(pools).admits(longest)
    assert not Ledger(pools).admits(longest + 1)


@given(pools=POOLS, actions=ACTIONS)
def test_books_that_were_emptied_are_as_good_as_new(
    pools: dict[str, Pool], actions: list[tuple[str, int, int]]
) -> None:
    ledger = Ledger(pools)
    for action, request, length in actions:
        if action == "hold":
            ledger.hold(request, length)
    for request in range(6):
        ledger.release(request)
        ledger.release(request)
    assert len(ledger) == 0
    assert not ledger.overdrawn
    assert ledger.admits(ledger.longest)


def test_a_request_that_grows_inside_its_last_block_takes_nothing_more() -> None:
    ledger = Ledger({"slm": Pool(capacity=32, block_size=16, slots=2)})
    ledger.hold(1, 1)
    ledger.hold(2, 16)
    ledger.hold(1, 16)
    assert not ledger.overdrawn
    ledger.hold(1, 17)
    assert ledger.overdrawn


def test_the_smallest_model_of_a_recipe_decides() -> None:
    ledger = Ledger({"slm": Pool(100, 1, 8), "llm": Pool(70, 16, 3)})
    assert ledger.longest == 64
    assert ledger.slots == 3
