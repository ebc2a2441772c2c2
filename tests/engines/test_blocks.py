"""The books of blocks: nothing is lost, nothing is held twice, and what is shared is never written to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenflow.engines.base import Feed
from tokenflow.engines.blocks import Blocks
from tokenflow.errors import EngineError

SIZE, COUNT, OPEN = 4, 12, 3


class Pool:
    """A pool of places that remembers which token lies where, and moves them with copied blocks."""

    def __init__(self, reuse: bool = True) -> None:
        self.at: dict[int, int] = {}
        self.books = Blocks(COUNT, SIZE, OPEN, reuse, self.copy)

    def copy(self, source: int, target: int) -> None:
        for offset in range(SIZE):
            if source * SIZE + offset in self.at:
                self.at[target * SIZE + offset] = self.at[source * SIZE + offset]

    def feed(self, slot: int, tokens: list[int]) -> None:
        feeds = [Feed(slot, tokens)]
        start = self.books.length(slot)
        self.books.reserve(feeds)
        for place, token in zip(self.books.places(slot, start, start + len(tokens)), tokens, strict=True):
            self.at[place] = token
        self.books.commit(feeds)

    def read(self, slot: int) -> list[int]:
        return [self.at[place] for place in self.books.places(slot, 0, self.books.length(slot))]


@settings(deadline=None)
@given(st.data())
def test_a_slot_reads_what_it_was_fed_whatever_the_others_do(data: st.DataObject) -> None:
    pool = Pool(data.draw(st.booleans()))
    held: dict[int, list[int]] = {}
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=10)
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["open", "feed", "truncate", "release"]))
        if action == "open" and len(held) < OPEN:
            wanted = data.draw(tokens)
            slot, cached = pool.books.open(wanted)
            assert cached < len(wanted)
            held[slot] = wanted[:cached]
        elif held:
            slot = data.draw(st.sampled_from(sorted(held)))
            if action == "feed":
                more = data.draw(tokens)
                lengths = [len(kept) + (len(more) if one == slot else 0) for one, kept in held.items()]
                if sum(-(-length // SIZE) for length in lengths) <= COUNT:
                    pool.feed(slot, more)
                    held[slot] = held[slot] + more
            elif action == "truncate":
                length = data.draw(st.integers(0, len(held[slot])))
                pool.books.truncate(slot, length)
                held[slot] = held[slot][:length]
            elif action == "release":
                pool.books.release(slot)
                del held[slot]
        assert {slot: pool.read(slot) for slot in held} == held
        assert all(0 not in pool.books.of(slot) for slot in held)


def test_what_is_reserved_and_not_computed_is_free_again() -> None:
    pool = Pool()
    slot, _ = pool.books.open([1])
    for _ in range(3):
        feeds = [Feed(slot, [1] * (SIZE * COUNT))]
        pool.books.reserve(feeds)
        with pytest.raises(EngineError, match=r"KV cache full: 1 more blocks of 4 tokens .* 0 are free"):
            pool.books.reserve([Feed(pool.books.open([2]).slot, [2])])
        pool.books.abandon(feeds)
        pool.books.release(1)
