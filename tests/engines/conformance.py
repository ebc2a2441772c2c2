"""The engine protocol as tests: derive from :class:`EngineConformance` and give it a ``make`` fixture.

An engine that shows the logits of the last position only, and has no cache of its own, derives from
:class:`SlotConformance`, which is the part that applies.

``make(**config)`` builds a fresh engine over one fixed float32 model with a vocabulary of at least 32 ids and
a context of at least 128 tokens; ``config`` overrides fields of ``ModelConfig``.  The reference of every test
is the engine itself, used in the simplest way: one slot, everything fed at once, nothing cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from tokenflow.engines.base import Engine, Extend
from tokenflow.errors import EngineError

Make = Callable[..., Engine]

IDS = 32
ROOMY = {"kv_cache": 1024, "max_requests": 8}
TOLERANCE = 2e-5


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """Deterministic token ids without long repetitions."""
    return [(seed * 7 + i * i * 3 + i * 5 + i // 11) % IDS for i in range(count)]


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to float32 rounding, measured against the largest value."""
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=TOLERANCE * scale)


def fill(engine: Engine, tokens: Sequence[int]) -> tuple[int, Tensor]:
    """Open a slot for ``tokens`` and feed what is not cached; the slot and the logits of the last, [V]."""
    slot, cached = engine.open(tokens)
    return slot, engine.step([Extend(slot, tokens[cached:])]).logits[0]


def feed(engine: Engine, tokens: Sequence[int], chunk: int | None = None) -> tuple[int, Tensor]:
    """Open a slot for ``tokens`` and feed what is not cached; the slot and the logits of the fed ones."""
    slot, cached = engine.open(tokens)
    size = chunk or len(tokens)
    chunks = [tokens[start : start + size] for start in range(cached, len(tokens), size)]
    return slot, torch.cat([engine.step([Extend(slot, part, "all")]).logits for part in chunks])


class SlotConformance:
    """What every engine must do with its slots; see the module's docstring."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError("override this fixture in the test class of your engine")

    @pytest.fixture
    def expected(self, make: Make) -> Callable[[Sequence[int]], Tensor]:
        """Logits of the last position of a sequence, [1, V], from a fresh slot."""
        engine = make(**ROOMY, prefix_cache=False)

        def logits(tokens: Sequence[int]) -> Tensor:
            slot, last = fill(engine, tokens)
            engine.release(slot)
            return last[None]

        return logits

    def test_members_may_leave_a_batch_and_come_back(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(**ROOMY)
        sequences = [tokens_of(10 + 9 * seed, seed) for seed in range(6)]
        slots = [fill(engine, tokens)[0] for tokens in sequences]
        for turn, present in enumerate(([0, 1, 2, 3, 4, 5], [1, 3, 5], [0, 2, 3], [4], [5, 4, 0, 1])):
            token = 3 + turn
            output = engine.step([Extend(slots[i], [token]) for i in present])
            for i in present:
                sequences[i].append(token)
            close(output.logits, torch.stack([expected(sequences[i])[-1] for i in present]))

    def test_length_counts_what_was_fed(self, make: Make) -> None:
        engine = make(**ROOMY)
        slot, _ = engine.open([1, 2, 3, 4])
        assert engine.length(slot) == 0
        engine.step([Extend(slot, [1, 2])])
        engine.step([Extend(slot, [3])])
        assert engine.length(slot) == 3

    @pytest.mark.parametrize("length", [-1, 11])
    def test_a_slot_cannot_be_truncated_to_what_it_does_not_hold(self, make: Make, length: int) -> None:
        engine = make(**ROOMY)
        slot, _ = fill(engine, tokens_of(10))
        with pytest.raises(EngineError, match=r"holds 10"):
            engine.truncate(slot, length)
        assert engine.length(slot) == 10

    def test_every_slot_can_be_taken_but_no_more(self, make: Make) -> None:
        engine = make(kv_cache=256, max_requests=3)
        slots = [fill(engine, tokens_of(5, seed))[0] for seed in range(3)]
        assert len(set(slots)) == 3
        with pytest.raises(EngineError, match=r"all 3 slots are taken"):
            engine.open([1, 2])
        engine.release(slots[1])
        assert engine.open([1, 2]).slot >= 0

    def test_a_slot_cannot_outgrow_the_context(self, make: Make) -> None:
        engine = make(kv_cache=512, max_requests=2, context_length=64)
        slot, _ = fill(engine, tokens_of(64))
        with pytest.raises(EngineError, match=r"context of 64"):
            engine.step([Extend(slot, [1])])

    def test_steps_that_make_no_sense_are_refused(self, make: Make) -> None:
        engine = make(**ROOMY)
        slot, _ = fill(engine, [1, 2, 3])
        gone, _ = engine.open([4])
        engine.release(gone)
        vocabulary = engine.info.vocab_size
        for extends, message in (
            ([], "at least one extend"),
            ([Extend(slot, [])], "no tokens"),
            ([Extend(slot, [1]), Extend(slot, [2])], "twice"),
            ([Extend(gone, [1])], "not open"),
            ([Extend(slot, [vocabulary])], "outside the vocabulary"),
            ([Extend(slot, [1, -1])], "outside the vocabulary"),
        ):
            with pytest.raises(EngineError, match=message):
                engine.step(extends)
        for call in (engine.length, engine.release, lambda closed: engine.truncate(closed, 0)):
            with pytest.raises(EngineError, match="not open"):
                call(gone)
        assert engine.length(slot) == 3

    def test_a_mixed_batch_gives_what_its_members_get_alone(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(**ROOMY)
        lengths = [40, 7, 90, 22, 3, 61]
        held = [0, 6, 80, 21, 2, 57]
        sequences = [tokens_of(n, seed) for seed, n in enumerate(lengths)]
        slots = [engine.open(tokens).slot for tokens in sequences]
        for slot, tokens, count in zip(slots, sequences, held, strict=True):
            if count:
                engine.step([Extend(slot, tokens[:count], "none")])
        output = engine.step(
            [Extend(slot, tokens[count:]) for slot, tokens, count in zip(slots, sequences, held, strict=True)]
        )
        close(output.logits, torch.stack([expected(tokens)[-1] for tokens in sequences]))

    def test_slots_can_be_opened_and_released_for_ever(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(kv_cache=128, max_requests=3)
        open_slots: list[int] = []
        for turn in range(40):
            if len(open_slots) == 3:
                engine.release(open_slots.pop(turn % 3))
            tokens = tokens_of(30 + turn % 3, seed=turn % 7)
            slot, logits = fill(engine, tokens)
            open_slots.append(slot)
            close(logits, expected(tokens)[-1])

    def test_a_step_without_wanted_positions_fills_the_cache(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(**ROOMY)
        tokens = tokens_of(20)
        slot, _ = engine.open(tokens)
        output = engine.step([Extend(slot, tokens[:13], "none")])
        assert output.logits.shape == (0, engine.info.vocab_size)
        assert output.hidden.shape == (0, engine.info.hidden_size)
        assert engine.length(slot) == 13
        close(engine.step([Extend(slot, tokens[13:])]).logits[0], expected(tokens)[-1])

    @pytest.mark.parametrize("kept", [0, 1, 15, 39, 40])
    def test_a_truncated_slot_forgets_what_followed(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor], kept: int
    ) -> None:
        engine = make(**ROOMY)
        tokens = tokens_of(40)
        slot, _ = fill(engine, tokens)
        engine.truncate(slot, kept)
        assert engine.length(slot) == kept
        output = engine.step([Extend(slot, [7, 8])])
        close(output.logits[0], expected([*tokens[:kept], 7, 8])[-1])


class EngineConformance(SlotConformance):
    """What an engine with a cache of its own must do beyond that."""

    @pytest.fixture
    def expected(self, make: Make) -> Callable[[Sequence[int]], Tensor]:
        """Logits of every position of a sequence, [n, V], from a fresh slot."""
        engine = make(**ROOMY, prefix_cache=False)

        def logits(tokens: Sequence[int]) -> Tensor:
            slot, result = feed(engine, tokens)
            engine.release(slot)
            return result

        return logits

    def test_the_facts_fit_what_the_engine_returns(self, make: Make) -> None:
        engine = make(**ROOMY)
        info = engine.info
        slot, _ = engine.open([1, 2, 3])
        output = engine.step([Extend(slot, [1, 2, 3], "all")])
        assert output.logits.shape == (3, info.vocab_size)
        assert output.hidden.shape == (3, info.hidden_size)
        assert info.max_requests == ROOMY["max_requests"]
        assert 0 < info.kv_capacity <= ROOMY["kv_cache"]
        assert info.block_size >= 1
        assert info.kv_capacity % info.block_size == 0

    def test_a_caller_gets_the_wanted_positions_in_the_order_of_the_extends(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(**ROOMY)
        sequences = [tokens_of(n, seed) for seed, n in enumerate((9, 1, 4, 1, 12))]
        slots = [engine.open(tokens).slot for tokens in sequences]
        wanted = ["last", "all", "none", "last", "all"]
        order = [3, 0, 4, 2, 1]
        output = engine.step([Extend(slots[i], sequences[i], wanted[i]) for i in order])  # type: ignore[arg-type]
        parts = {"none": slice(0, 0), "last": slice(-1, None), "all": slice(None)}
        close(output.logits, torch.cat([expected(sequences[i])[parts[wanted[i]]] for i in order]))
        assert len(output.hidden) == len(output.logits)

    @pytest.mark.parametrize("chunk", [1, 3, 64, 70])
    def test_chunks_give_what_one_piece_gives(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor], chunk: int
    ) -> None:
        tokens = tokens_of(100)
        _, logits = feed(make(**ROOMY), tokens, chunk)
        close(logits, expected(tokens))

    def test_hidden_states_do_not_depend_on_how_their_tokens_were_fed(self, make: Make) -> None:
        engine = make(**ROOMY, prefix_cache=False)
        tokens = tokens_of(30)
        whole, alone, pieces = (engine.open(tokens).slot for _ in range(3))
        expected = engine.step([Extend(whole, tokens, "all")]).hidden
        close(torch.cat([engine.step([Extend(alone, [token])]).hidden for token in tokens]), expected)
        engine.step([Extend(pieces, tokens[:17], "none")])
        close(engine.step([Extend(pieces, tokens[17:])]).hidden, expected[-1:])

    @pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 39, 40])
    def test_a_truncated_slot_goes_on_like_a_fresh_one(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor], kept: int
    ) -> None:
        engine = make(**ROOMY)
        tokens = tokens_of(40)
        slot, _ = feed(engine, tokens)
        engine.truncate(slot, kept)
        assert engine.length(slot) == kept
        more = tokens_of(25, seed=5)
        output = engine.step([Extend(slot, more, "all")])
        close(output.logits, expected([*tokens[:kept], *more])[kept:])

    @pytest.mark.parametrize("other", [0, 40, 50])
    def test_a_released_prefix_is_reused_and_changes_nothing(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor], other: int
    ) -> None:
        engine = make(**ROOMY)
        first = tokens_of(64)
        slot, _ = feed(engine, first)
        engine.release(slot)
        second = [*first[:other], *tokens_of(30, seed=9)]
        slot, cached = engine.open(second)
        assert cached >= (other - engine.info.block_size if other else 0)
        assert cached <= other + 1
        output = engine.step([Extend(slot, second[cached:], "all")])
        close(output.logits, expected(second)[cached:])

    def test_the_last_token_is_never_cached(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(**ROOMY)
        tokens = tokens_of(48)
        feed(engine, tokens)
        for length in (48, 33, 32, 2, 1):
            slot, cached = engine.open(tokens[:length])
            assert cached < length
            output = engine.step([Extend(slot, tokens[cached:length])])
            close(output.logits[0], expected(tokens[:length])[-1])
            engine.release(slot)

    def test_an_open_slot_lends_its_prefix_and_is_not_disturbed(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(**ROOMY)
        first = tokens_of(50)
        second = [*first[:40], *tokens_of(20, seed=3)]
        one, _ = feed(engine, first)
        two, cached = engine.open(second)
        assert cached >= 40 - engine.info.block_size
        engine.step([Extend(two, second[cached:], "none")])
        engine.truncate(two, 36)
        changed = [*second[:36], *tokens_of(12, seed=4)]
        output = engine.step([Extend(one, [7]), Extend(two, changed[36:])])
        close(output.logits, torch.stack([expected([*first, 7])[-1], expected(changed)[-1]]))
        engine.truncate(one, 30)
        engine.release(one)
        output = engine.step([Extend(two, [9])])
        close(output.logits[0], expected([*changed, 9])[-1])

    def test_what_follows_a_rollback_is_not_found_behind_what_it_replaced(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(**ROOMY)
        replaced, other, tail = tokens_of(48), tokens_of(32, seed=8), tokens_of(16, seed=9)
        slot, _ = feed(engine, [*replaced, 3])
        engine.truncate(slot, 16)
        engine.step([Extend(slot, [*other, *tail, 4], "none")])
        for tokens in ([*replaced, *tail, 5], [*replaced[:16], *other, *tail, 5]):
            slot, cached = engine.open(tokens)
            close(engine.step([Extend(slot, tokens[cached:])]).logits[0], expected(tokens)[-1])

    def test_without_a_prefix_cache_nothing_is_reused(self, make: Make) -> None:
        engine = make(**ROOMY, prefix_cache=False)
        tokens = tokens_of(40)
        slot, _ = feed(engine, tokens)
        assert engine.open(tokens).cached == 0
        engine.release(slot)
        assert engine.open(tokens).cached == 0

    def test_the_whole_capacity_can_be_used_after_prefixes_filled_it(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(kv_cache=128, max_requests=4)
        for seed in range(6):
            engine.release(feed(engine, tokens_of(60, seed))[0])
        share = engine.info.kv_capacity // 4 // engine.info.block_size * engine.info.block_size
        sequences = [tokens_of(share, seed=20 + seed) for seed in range(4)]
        for tokens in sequences:
            _, logits = feed(engine, tokens)
            close(logits[-1], expected(tokens)[-1])

    def test_a_step_over_the_capacity_is_refused_and_harms_nobody(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(kv_cache=64, max_requests=2)
        first = tokens_of(40)
        one, _ = feed(engine, first)
        two, _ = engine.open(tokens_of(40, seed=1))
        with pytest.raises(EngineError, match=r"KV cache full"):
            engine.step([Extend(two, tokens_of(40, seed=1))])
        assert engine.length(two) == 0
        output = engine.step([Extend(one, [5]), Extend(two, [6])])
        close(output.logits, torch.stack([expected([*first, 5])[-1], expected([6])[-1]]))

    def test_one_request_may_use_everything(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(kv_cache=128, max_requests=4)
        tokens = tokens_of(min(engine.info.context_length, engine.info.kv_capacity))
        _, logits = feed(engine, tokens, chunk=50)
        close(logits[-1], expected(tokens)[-1])

    def test_scores_are_the_logarithms_of_the_next_token_probabilities(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(**ROOMY)
        tokens = tokens_of(80)
        scores = engine.score(tokens, top=4)
        logprobs = expected(tokens)[:-1].float().log_softmax(-1)
        close(scores.logprobs, logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
        best = logprobs.topk(4, -1)
        close(scores.top_logprobs, best.values)
        assert scores.top_ids.tolist() == best.indices.tolist()
        assert scores.logprobs.dtype == scores.top_logprobs.dtype == torch.float32
        assert engine.score(tokens[:2]).top_ids.shape == (1, 0)

    def test_scoring_needs_no_room_of_its_own_and_leaves_no_trace(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        engine = make(kv_cache=64, max_requests=1)
        tokens = tokens_of(63)
        slot, _ = feed(engine, tokens)
        close(engine.score(tokens_of(50, 3)).logprobs[-1:], expected_score(expected, tokens_of(50, 3)))
        close(engine.step([Extend(slot, [5])]).logits[0], expected([*tokens, 5])[-1])

    def test_one_token_cannot_be_scored(self, make: Make) -> None:
        engine = make(**ROOMY)
        for tokens in ([], [3]):
            with pytest.raises(EngineError, match="nothing to score"):
                engine.score(tokens)

    def test_any_course_of_events_gives_what_a_recomputation_gives(
        self, make: Make, expected: Callable[[Sequence[int]], Tensor]
    ) -> None:
        run_state_machine_as_test(
            lambda: SlotMachine(make, expected),
            settings=settings(
                max_examples=20,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def expected_score(expected: Callable[[Sequence[int]], Tensor], tokens: list[int]) -> Tensor:
    """Log-probability of the last token after the others, [1]."""
    return expected(tokens)[-2].float().log_softmax(-1)[tokens[-1] :][:1]


class SlotMachine(RuleBasedStateMachine):
    """Random opens, batches, truncations and releases, within the books that the router keeps."""

    slots: Bundle[int] = Bundle("slots")

    def __init__(self, make: Make, expected: Callable[[Sequence[int]], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.expected = expected
        self.held: dict[int, list[int]] = {}

    @initialize(reuse=st.booleans())
    def start(self, reuse: bool) -> None:
        self.engine = self.make(kv_cache=96, max_requests=3, prefix_cache=reuse)
        info = self.engine.info
        self.capacity, self.block = info.kv_capacity, info.block_size
        self.context = min(info.context_length, info.kv_capacity)

    def fits(self, lengths: dict[int, int]) -> bool:
        total = sum(-(-n // self.block) * self.block for n in lengths.values())
        return total <= self.capacity and max(lengths.values(), default=0) <= self.context

    def after(self, slot: int, length: int) -> dict[int, int]:
        return {other: len(tokens) for other, tokens in self.held.items()} | {slot: length}

    @rule(target=slots, seed=st.integers(0, 2), length=st.integers(1, 40), own=st.integers(0, 3))
    def open(self, seed: int, length: int, own: int) -> object:
        tokens = [*tokens_of(length, seed), *tokens_of(own, seed + 10)]
        if len(self.held) == 3 or not self.fits(self.after(-1, len(tokens))):
            return multiple()
        slot, cached = self.engine.open(tokens)
        assert 0 <= cached < len(tokens)
        assert slot not in self.held
        self.held[slot] = tokens[:cached]
        output = self.engine.step([Extend(slot, tokens[cached:])])
        self.held[slot] = tokens
        close(output.logits[0], self.expected(tokens)[-1])
        return slot

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        lengths = {slot: len(tokens) for slot, tokens in self.held.items()}
        extends, targets = [], []
        for slot in chosen:
            more = data.draw(
                st.one_of(st.just([4]), st.lists(st.integers(0, IDS - 1), min_size=1, max_size=12))
            )
            lengths[slot] += len(more)
            if not self.fits(lengths):
                lengths[slot] -= len(more)
                continue
            extends.append(Extend(slot, more, data.draw(st.sampled_from(["last", "all", "none"]))))
            targets.append((self.held[slot], more))
        if not extends:
            return
        output = self.engine.step(extends)
        wanted = []
        for extend, (tokens, more) in zip(extends, targets, strict=True):
            tokens += more
            count = {"none": 0, "last": 1, "all": len(more)}[extend.logits]
            wanted.append(self.expected(tokens)[len(tokens) - count :])
        close(output.logits, torch.cat(wanted))

    @rule(slot=slots, data=st.data())
    def truncate(self, slot: int, data: st.DataObject) -> None:
        if slot in self.held:
            length = data.draw(st.integers(0, len(self.held[slot])))
            self.engine.truncate(slot, length)
            del self.held[slot][length:]

    @rule(slot=consumes(slots))
    def release(self, slot: int) -> None:
        if slot in self.held:
            self.engine.release(slot)
            del self.held[slot]

    @invariant()
    def lengths_agree(self) -> None:
        assert {slot: self.engine.length(slot) for slot in self.held} == {
            slot: len(tokens) for slot, tokens in self.held.items()
        }
