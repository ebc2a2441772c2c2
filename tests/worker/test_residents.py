"""Handles and engine slots stay in step, and one step's tokens are shared out fairly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenflow.engines.base import EngineInfo, Extend, Opened, Scores, StepOutput
from tokenflow.errors import ProtocolError
from tokenflow.types import SamplingParams
from tokenflow.wire.messages import Open, Row, Step
from tokenflow.worker.residents import Resident, Residents, plan


class FakeEngine:
    """Books of slots only: what each holds, and that each is closed once."""

    def __init__(self, cached: int = 0) -> None:
        self.slots: dict[int, list[int]] = {}
        self._cached = cached
        self._next = 0

    @property
    def info(self) -> EngineInfo:
        raise NotImplementedError

    def open(self, tokens: Sequence[int]) -> Opened:
        cached = min(self._cached, len(tokens) - 1)
        self._next += 1
        self.slots[self._next] = list(tokens[:cached])
        return Opened(self._next, cached)

    def step(self, extends: Sequence[Extend]) -> StepOutput:
        raise NotImplementedError

    def length(self, slot: int) -> int:
        return len(self.slots[slot])

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length < len(self.slots[slot])
        del self.slots[slot][length:]

    def release(self, slot: int) -> None:
        del self.slots[slot]

    def score(self, tokens: Sequence[int], top: int = 0) -> Scores:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def opening(handle: int, epoch: int = 0) -> Open:
    return Open(handle, epoch, 1, 0, SamplingParams(), ())


def change(
    *, drop: Sequence[int] = (), opens: Sequence[Open] = (), truncate: Sequence[tuple[int, int]] = ()
) -> Step:
    return Step(1, list(drop), list(opens), list(truncate), [])


def feed(engine: FakeEngine, resident: Resident, count: int) -> None:
    """What the worker does after a plan: the engine gets the next ``count`` tokens."""
    engine.slots[resident.slot] += resident.tokens[resident.fed : resident.fed + count]
    resident.fed += count


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def residents(engine: FakeEngine) -> Residents:
    residents = Residents(engine)
    residents.apply(change(opens=[opening(1)]))
    return residents


def test_a_slot_is_taken_when_the_first_tokens_come_not_before(
    engine: FakeEngine, residents: Residents
) -> None:
    assert (len(residents), engine.slots) == (1, {})
    resident, cached = residents.extend(Row(1, 0, 0, [5, 6, 7], 0))
    assert (resident.slot, resident.fed, resident.pending, cached) == (1, 0, 3, 0)
    again, cached = residents.extend(Row(1, 0, 3, [8], 0))
    assert again is resident
    assert (resident.pending, cached, len(engine.slots)) == (4, 0, 1)


def test_tokens_of_a_prefix_cache_need_not_be_fed() -> None:
    residents = Residents(FakeEngine(cached=2))
    residents.apply(change(opens=[opening(1)]))
    resident, cached = residents.extend(Row(1, 0, 0, [5, 6, 7], 0))
    assert (cached, resident.fed, resident.pending) == (2, 2, 1)


def test_the_rest_of_a_chunked_extension_comes_without_tokens(
    engine: FakeEngine, residents: Residents
) -> None:
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6, 7], 0))
    feed(engine, resident, 2)
    rest, _ = residents.extend(Row(1, 0, 3, [], 0))
    assert rest.pending == 1


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row(2, 0, 0, [5], 0), "handle 2 is not open"),
        (
            Row(1, 1, 2, [5], 0),
            "row of handle 1 (epoch 1, base 2) does not continue epoch 0 with 2 tokens",
        ),
        (
            Row(1, 0, 1, [5], 0),
            "row of handle 1 (epoch 0, base 1) does not continue epoch 0 with 2 tokens",
        ),
        (
            Row(1, 0, 3, [5], 0),
            "row of handle 1 (epoch 0, base 3) does not continue epoch 0 with 2 tokens",
        ),
    ],
    ids=["unknown handle", "other epoch", "base too low", "base too high"],
)
def test_a_row_that_does_not_continue_what_is_held_is_refused(
    engine: FakeEngine, residents: Residents, row: Row, why: str
) -> None:
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6], 0))
    feed(engine, resident, 2)
    with pytest.raises(ProtocolError) as caught:
        residents.extend(row)
    assert str(caught.value) == why


def test_a_row_without_tokens_reads_the_last_one_again(engine: FakeEngine, residents: Residents) -> None:
    """A request may be taken back to where a model had read to."""
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6], 0))
    feed(engine, resident, 2)
    again, saved = residents.extend(Row(1, 0, 2, [], 0))
    assert (again, saved) == (resident, 0)
    assert (resident.tokens, resident.fed, resident.pending) == ([5, 6], 1, 1)
    assert engine.length(resident.slot) == 1


def test_tokens_to_be_checked_come_with_the_one_before_them(engine: FakeEngine, residents: Residents) -> None:
    """What the first of them is compared with are the logits of the token before it."""
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6], 0))
    feed(engine, resident, 2)
    residents.extend(Row(1, 0, 2, [7, 8], 0, 2))
    assert (resident.fed, resident.pending, engine.length(resident.slot)) == (1, 3, 1)
    assert plan([resident], 10) == [3]


def test_a_row_before_any_tokens_is_refused(residents: Residents) -> None:
    with pytest.raises(ProtocolError, match="row of handle 1 has nothing to feed"):
        residents.extend(Row(1, 0, 0, [], 0))


def test_a_handle_opened_anew_starts_empty_and_its_old_slot_is_closed(
    engine: FakeEngine, residents: Residents
) -> None:
    old, _ = residents.extend(Row(1, 0, 0, [5, 6], 0))
    residents.apply(change(opens=[opening(1, epoch=1)]))
    assert engine.slots == {}
    with pytest.raises(ProtocolError, match="does not continue epoch 1 with 0 tokens"):
        residents.extend(Row(1, 0, 2, [7], 0))
    new, _ = residents.extend(Row(1, 1, 0, [5], 0))
    assert new is not old
    assert list(engine.slots) == [new.slot]


def test_a_drop_and_an_opening_in_one_step_leave_the_handle_open(
    engine: FakeEngine, residents: Residents
) -> None:
    residents.extend(Row(1, 0, 0, [5, 6], 0))
    residents.apply(change(drop=[1], opens=[opening(1, epoch=1)]))
    assert len(residents) == 1
    assert engine.slots == {}


def test_a_handle_may_be_dropped_twice_or_before_it_has_a_slot(
    engine: FakeEngine, residents: Residents
) -> None:
    residents.apply(change(drop=[1, 1, 99]))
    assert len(residents) == 0
    with pytest.raises(ProtocolError, match="handle 1 is not open"):
        residents.extend(Row(1, 0, 0, [5], 0))


def test_truncating_what_was_fed_reaches_the_engine(engine: FakeEngine, residents: Residents) -> None:
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6, 7, 8], 0))
    feed(engine, resident, 3)
    residents.apply(change(truncate=[(1, 2)]))
    assert engine.slots[resident.slot] == [5, 6]
    assert (resident.tokens, resident.fed) == ([5, 6], 2)
    residents.extend(Row(1, 0, 2, [9], 0))
    assert resident.pending == 1


def test_truncating_what_is_given_but_not_fed_leaves_the_engine_alone(
    engine: FakeEngine, residents: Residents
) -> None:
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6, 7, 8], 0))
    feed(engine, resident, 2)
    residents.apply(change(truncate=[(1, 3)]))
    assert engine.slots[resident.slot] == [5, 6]
    assert (resident.tokens, resident.fed, resident.pending) == ([5, 6, 7], 2, 1)


def test_truncating_to_the_length_held_changes_nothing(engine: FakeEngine, residents: Residents) -> None:
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6], 0))
    feed(engine, resident, 2)
    residents.apply(change(truncate=[(1, 2)]))
    assert (resident.tokens, resident.fed) == ([5, 6], 2)


def test_a_handle_truncated_to_nothing_takes_new_tokens_in_the_same_slot(
    engine: FakeEngine, residents: Residents
) -> None:
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6], 0))
    feed(engine, resident, 2)
    slot = resident.slot
    residents.apply(change(truncate=[(1, 0)]))
    residents.extend(Row(1, 0, 0, [7], 0))
    assert (resident.slot, resident.tokens, resident.fed) == (slot, [7], 0)
    assert engine.slots == {slot: []}


@pytest.mark.parametrize("length", [-1, 3])
def test_a_length_that_the_handle_does_not_have_is_refused(residents: Residents, length: int) -> None:
    resident, _ = residents.extend(Row(1, 0, 0, [5, 6], 0))
    with pytest.raises(ProtocolError, match=f"^handle 1 has 2 tokens and cannot keep {length} of them$"):
        residents.apply(change(truncate=[(1, length)]))
    assert resident.tokens == [5, 6]


def test_truncating_an_unknown_handle_is_refused(residents: Residents) -> None:
    with pytest.raises(ProtocolError, match="handle 7 is not open"):
        residents.apply(change(truncate=[(7, 0)]))


HANDLES = st.integers(1, 4)


class ResidentsMachine(RuleBasedStateMachine):
    """Any conversation that the router may have: the engine holds exactly what was fed and not forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(cached=2)
        self.residents = Residents(self.engine)
        self.given: dict[int, list[int]] = {}
        self.epochs: dict[int, int] = {}
        self.running: dict[int, Resident] = {}

    @rule(handle=HANDLES, dropped=st.booleans())
    def open(self, handle: int, dropped: bool) -> None:
        self.epochs[handle] = self.epochs.get(handle, -1) + 1
        opens = [opening(handle, self.epochs[handle])]
        self.residents.apply(change(drop=[handle] if dropped else [], opens=opens))
        self.given[handle] = []
        self.running.pop(handle, None)

    @rule(handle=HANDLES)
    def drop(self, handle: int) -> None:
        self.residents.apply(change(drop=[handle]))
        self.given.pop(handle, None)
        self.running.pop(handle, None)

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    @precondition(lambda self: self.given)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        handle = data.draw(st.sampled_from(sorted(self.given)))
        row = Row(handle, self.epochs[handle], len(self.given[handle]), tokens, 0)
        resident, cached = self.residents.extend(row)
        self.given[handle] += tokens
        assert cached == 0 or handle not in self.running
        assert resident.pending >= 1
        self.running[handle] = resident

    @rule(data=st.data(), budget=st.integers(1, 8))
    @precondition(lambda self: any(resident.pending for resident in self.running.values()))
    def run(self, data: st.DataObject, budget: int) -> None:
        batch = [resident for resident in self.running.values() if resident.pending]
        for resident, share in zip(batch, plan(batch, budget), strict=True):
            feed(self.engine, resident, share)

    @rule(data=st.data())
    @precondition(lambda self: self.given)
    def truncate(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.given)))
        length = data.draw(st.integers(0, len(self.given[handle])))
        self.residents.apply(change(truncate=[(handle, length)]))
        del self.given[handle][length:]

    @invariant()
    def the_engine_holds_what_was_fed(self) -> None:
        assert len(self.residents) == len(self.given)
        assert set(self.engine.slots) == {resident.slot for resident in self.running.values()}
        for handle, resident in self.running.items():
            assert resident.tokens == self.given[handle]
            assert self.engine.slots[resident.slot] == self.given[handle][: resident.fed]


TestConversations = ResidentsMachine.TestCase


def waiting(*pending: int) -> list[Resident]:
    return [Resident(opening(index), tokens=[0] * count) for index, count in enumerate(pending)]


PENDING = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(pending=PENDING, budget=st.integers(1, 60))
def test_one_steps_tokens_are_shared_out_within_the_budget(pending: list[int], budget: int) -> None:
    shares = plan(waiting(*pending), budget)
    decodes = pending.count(1)
    longer = len(pending) > decodes
    assert all(0 <= share <= count for share, count in zip(shares, pending, strict=True))
    assert all(share == 1 for share, count in zip(shares, pending, strict=True) if count == 1)
    assert sum(shares) == min(sum(pending), max(budget, decodes + longer))


@given(pending=PENDING, budget=st.integers(1, 60))
def test_longer_extends_are_served_in_order(pending: list[int], budget: int) -> None:
    shares = plan(waiting(*pending), budget)
    cut = [count - share for share, count in zip(shares, pending, strict=True) if count > 1]
    served = [share for share, count in zip(shares, pending, strict=True) if count > 1]
    first_cut = next((index for index, left in enumerate(cut) if left), len(cut))
    assert all(share == 0 for share in served[first_cut + 1 :])


def test_a_long_prefill_advances_though_decodes_fill_the_budget() -> None:
    assert plan(waiting(1, 9, 1, 9, 1), 2) == [1, 1, 1, 0, 1]


def test_every_extend_is_fed_in_a_bounded_number_of_steps() -> None:
    residents = waiting(1, 30, 1, 7, 2)
    steps = 0
    while any(resident.pending for resident in residents):
        batch = [resident for resident in residents if resident.pending]
        for resident, share in zip(batch, plan(batch, 10), strict=True):
            resident.fed += share
        steps += 1
    assert steps == 5
