"""The mailbox against a simple model of it, with the clock in the test's hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenflow.actors.mailbox import Mailbox

PATIENCE_S = 5.0


class ManualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run until nothing more happens at this time."""
        self.run_until_complete(_turns(6))

    def call(self, function: Callable[[], object]) -> None:
        """Call a function as a callback of this loop, so that it can ask which loop is running."""
        self.run_until_complete(_call(function))


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _call(function: Callable[[], object]) -> None:
    function()


def delayed(least: Callable[[], int], patience_s: float) -> Mailbox[Any]:
    """A mailbox whose batches wait for so many items."""
    mailbox: Mailbox[Any] = Mailbox(lambda: 0.0 if len(mailbox) >= least() else math.inf, lambda: patience_s)
    return mailbox


ITEMS = st.integers(0, 5)
PUT = st.tuples(st.just("put"), ITEMS, st.just(False))
CHANGES = st.one_of(
    PUT,
    PUT,
    st.tuples(st.just("put"), ITEMS, st.just(True)),
    st.tuples(st.just("discard"), ITEMS),
    st.tuples(st.just("threshold"), st.integers(1, 5)),
    st.tuples(st.just("hold"), st.integers(0, 4)),
    st.tuples(st.just("poke")),
)


class MailboxMachine(RuleBasedStateMachine):
    """Bursts of changes between which the consumer gets to run, or not, or is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = ManualLoop()
        self.threshold = 4
        self.held_until = 0.0
        self.mailbox: Mailbox[int] = Mailbox(self.hold_s, lambda: PATIENCE_S)
        self.arrived: dict[int, float] = {}
        self.urgent: set[int] = set()
        self.poked = False
        self.limit = 0
        self.taking: asyncio.Task[list[int]] | None = None

    def teardown(self) -> None:
        if self.taking is not None:
            self.taking.cancel()
            self.loop.settle()
        self.loop.close()

    def hold_s(self) -> float:
        """What the mailbox asks: a threshold, and a time before which nothing starts."""
        if len(self.mailbox) < self.threshold:
            return math.inf
        return max(0.0, self.held_until - self.loop.now)

    @property
    def due(self) -> bool:
        """The model's answer to whether a batch is due."""
        if self.urgent:
            return True
        waited = self.loop.now - min(self.arrived.values(), default=self.loop.now)
        reached = len(self.arrived) >= self.threshold and self.loop.now >= self.held_until
        return bool(self.arrived) and (reached or waited >= PATIENCE_S)

    def change(self, kind: str, *arguments: int) -> None:
        if kind == "put":
            item, urgent = arguments
            self.mailbox.put(item, urgent=bool(urgent))
            self.arrived.setdefault(item, self.loop.now)
            if urgent:
                self.urgent.add(item)
        elif kind == "discard":
            self.mailbox.discard(arguments[0])
            self.arrived.pop(arguments[0], None)
            self.urgent.discard(arguments[0])
        elif kind == "threshold":
            self.threshold = arguments[0]
            self.mailbox.reconsider()
        elif kind == "hold":
            self.held_until = self.loop.now + arguments[0]
            self.mailbox.reconsider()
        else:
            self.mailbox.poke()
            self.poked = True

    @rule(changes=st.lists(PUT, min_size=1, max_size=2) | st.lists(CHANGES, min_size=1, max_size=5))
    def change_at_once(self, changes: list[tuple[str, ...]]) -> None:
        """Several changes before the consumer can run."""
        self.loop.call(lambda: [self.change(*change) for change in changes])
        self.consume()

    @rule(changes=st.lists(CHANGES, max_size=3), early=st.booleans())
    @precondition(lambda self: self.taking is not None)
    def cancel(self, changes: list[tuple[str, ...]], early: bool) -> None:
        """The consumer is cancelled before or after changes that would have woken it."""
        assert self.taking is not None

        def act() -> None:
            assert self.taking is not None
            if early:
                self.taking.cancel()
            for change in changes:
                self.change(*change)
            self.taking.cancel()

        self.loop.call(act)
        self.loop.settle()
        assert self.taking.cancelled()
        self.taking = None

    @rule(limit=st.integers(1, 5))
    @precondition(lambda self: self.taking is None)
    def take(self, limit: int) -> None:
        self.limit = limit
        self.taking = self.loop.create_task(self.mailbox.take(limit))
        self.consume()

    @rule(seconds=st.sampled_from([1.0, 2.0, 3.0, PATIENCE_S]))
    def wait(self, seconds: float) -> None:
        self.loop.now += seconds
        self.consume()

    def consume(self) -> None:
        """The consumer goes if and only if a batch is due, which is the oldest items, or it was poked."""
        due = self.due
        self.loop.settle()
        if self.taking is None:
            return
        assert self.taking.done() == (due or self.poked)
        if self.taking.done():
            expected = list(self.arrived)[: self.limit] if due else []
            assert self.taking.result() == expected
            self.poked = False
            self.taking = None
            for item in expected:
                del self.arrived[item]
                self.urgent.discard(item)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert len(self.mailbox) == len(self.arrived)
        assert {item for item in range(6) if item in self.mailbox} == set(self.arrived)
        due: list[bool] = []
        self.loop.call(lambda: due.append(self.mailbox.due))
        assert due == [self.due]


MailboxMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestMailbox = MailboxMachine.TestCase


@pytest.mark.anyio
async def test_items_beyond_the_limit_keep_their_order_and_their_urgency() -> None:
    mailbox = delayed(lambda: 4, 1e6)
    for item in "abcd":
        mailbox.put(item, urgent=item == "c")
    assert await mailbox.take(2) == ["a", "b"]
    assert mailbox.due
    mailbox.put("e")
    assert await mailbox.take(2) == ["c", "d"]
    assert "e" in mailbox
    assert not mailbox.due


@pytest.mark.anyio
async def test_an_item_put_again_keeps_its_place() -> None:
    mailbox = delayed(lambda: 1, 1e6)
    for item in "aba":
        mailbox.put(item)
    assert await mailbox.take(8) == ["a", "b"]


def test_an_item_put_again_keeps_its_age() -> None:
    async def put_twice_and_outwait() -> None:
        mailbox = delayed(lambda: 2, PATIENCE_S)
        mailbox.put("a")
        loop.now += PATIENCE_S - 1
        mailbox.put("a")
        assert not mailbox.due
        loop.now += 1
        assert await mailbox.take(8) == ["a"]

    loop = ManualLoop()
    try:
        loop.run_until_complete(put_twice_and_outwait())
    finally:
        loop.close()


@pytest.mark.anyio
async def test_a_poke_wakes_the_consumer_once_without_a_batch_below_the_threshold() -> None:
    mailbox = delayed(lambda: 2, 1e6)
    mailbox.put("a")
    mailbox.poke()
    mailbox.poke()
    assert await mailbox.take(8) == []
    mailbox.put("b")
    mailbox.poke()
    assert await mailbox.take(8) == ["a", "b"]
    assert not mailbox.due


@pytest.mark.anyio
async def test_an_item_waits_for_company_only_as_long_as_its_patience() -> None:
    mailbox = delayed(lambda: 3, 0.02)
    started = anyio.current_time()
    mailbox.put("a")
    mailbox.put("b")
    with anyio.fail_after(5):
        assert await mailbox.take(8) == ["a", "b"]
    assert anyio.current_time() - started >= 0.019


@pytest.mark.anyio
async def test_a_waiting_consumer_sees_a_lowered_threshold() -> None:
    threshold = 3
    mailbox = delayed(lambda: threshold, 1e6)
    mailbox.put("a")
    got: list[str] = []

    async def consume() -> None:
        got.extend(await mailbox.take(8))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            await anyio.wait_all_tasks_blocked()
            assert got == []
            threshold = 1
            mailbox.reconsider()
    assert got == ["a"]


@pytest.mark.anyio
async def test_every_item_of_a_busy_mailbox_is_handed_out_once_though_takes_are_cancelled() -> None:
    mailbox = delayed(lambda: 2, 0.001)
    got: list[int] = []

    async def consume() -> None:
        got.extend(await mailbox.take(3))

    with anyio.fail_after(10):
        for number in range(200):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                for _ in range(number % 4):
                    await anyio.lowlevel.checkpoint()
                mailbox.put(number)
                for _ in range(number % 5):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        while mailbox:
            await consume()
    assert got == list(range(200))
