"""What the two KV cache layouts do with memory and prefixes, beyond what the protocol demands."""

from __future__ import annotations

import mmap
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.tiny import VOCAB, make_model, some_tokens
from tokenflow.engines.base import Extend, Feed
from tokenflow.engines.prefix import ROOT, BlockTrie, common_prefix
from tokenflow.engines.torch import TorchEngine
from tokenflow.engines.torch.config import ModelSpec, RopeSpec
from tokenflow.engines.torch.kv import QUERY_BLOCK, CausalMasks, integers
from tokenflow.engines.torch.linear import Linear
from tokenflow.engines.torch.rows import RowCache, cuts
from tokenflow.errors import EngineError, ModelLoadError
from tokenflow.types import ModelConfig

CPU = torch.device("cpu")
SPEC = ModelSpec(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=64,
    norm_eps=1e-6,
    context_length=16384,
    tied=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeSpec(),
    eos_token_ids=(),
)
TOKEN_BYTES = 4 * 2 * 4 * 64 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def engine(model: Path, paged: bool, **config: object) -> TorchEngine:
    return TorchEngine(ModelConfig(path=str(model), **config), paged=paged)  # type: ignore[arg-type]


def fill(cache: RowCache, slot: int, tokens: list[int], value: float = 1.0) -> None:
    """Feed ``tokens`` with keys and values of ``value``."""
    plan = cache.plan([Feed(slot, tokens)])
    for layer in range(SPEC.layers):
        cache.write(layer, torch.full((len(tokens), 2 * SPEC.kv_heads, SPEC.head_dim), value), plan)
    cache.commit(plan)


def rows(capacity: int, max_open: int = 4, reuse: bool = True) -> RowCache:
    return RowCache(
        SPEC, torch.float32, CPU, row_length=capacity, capacity=capacity, max_open=max_open, reuse=reuse
    )


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.integers(-1, 30))
def test_the_common_prefix_is_what_a_loop_finds(a: list[int], b: list[int], limit: int) -> None:
    expected = 0
    while expected < min(len(a), len(b), limit) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(a, b, limit) == expected
    assert common_prefix(a, [*a, *b], limit) == max(0, min(len(a), limit))


def test_a_block_is_found_under_its_whole_prefix_only() -> None:
    trie = BlockTrie()
    first = trie.add(ROOT, (1, 2), block=10)
    second = trie.add(first, (3, 4), block=11)
    assert trie.find(ROOT, (3, 4)) is None
    assert trie.find(first, (3, 4)) == (second, 11)
    assert trie.add(first, (3, 4), block=12) == second
    assert not trie.holds(12)
    trie.drop(10)
    assert trie.find(ROOT, (1, 2)) is None
    again = trie.add(ROOT, (1, 2), block=13)
    assert trie.find(again, (3, 4)) is None


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=1, max_size=20), st.integers(0, 100)
)
def test_cuts_are_runs_of_neighbours_that_waste_less_than_a_call(
    rows: list[tuple[int, int]], call_cost: int
) -> None:
    slots, slot = [], 0
    for gap, _ in rows:
        slot += 1 + gap
        slots.append(slot)
    keys = [count for _, count in rows]
    stops = cuts(slots, keys, call_cost)
    assert stops[-1] == len(rows)
    start = 0
    for stop in stops:
        part = keys[start:stop]
        assert slots[start:stop] == list(range(slots[start], slots[start] + stop - start))
        assert max(part) * len(part) - sum(part) <= call_cost * (len(part) - 1)
        start = stop
    assert cuts(slots, [7] * len(slots), 0) == [
        i + 1 for i in range(len(slots)) if i + 1 == len(slots) or slots[i + 1] != slots[i] + 1
    ]


@settings(deadline=None)
@given(st.data())
def test_a_mask_lets_exactly_the_seen_keys_through(data: st.DataObject) -> None:
    group = data.draw(st.integers(1, 3))
    masks = CausalMasks(group, torch.float32, CPU)
    for _ in range(3):
        keys = data.draw(st.integers(1, 600))
        seen = data.draw(st.lists(st.integers(1, keys), min_size=1, max_size=5))
        mask = masks.of_singles(seen, keys)
        assert mask.shape == (len(seen), 1, 1, keys)
        assert torch.equal(mask[:, 0, 0] == 0, torch.arange(keys) < torch.tensor(seen)[:, None])
        assert bool(((mask == 0) | (mask == float("-inf"))).all())
        count = data.draw(st.integers(1, min(keys, QUERY_BLOCK)))
        mask = masks.of_block(count, keys)
        allowed = torch.ones(count, keys, dtype=torch.bool).tril(keys - count).repeat_interleave(group, 0)
        assert torch.equal(mask[0, 0], torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf")))


def test_integers_are_an_int64_vector() -> None:
    assert integers([], CPU).tolist() == []
    assert integers([3, -1], CPU).tolist() == [3, -1]
    assert integers(range(2), CPU).dtype == torch.int64


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_what_a_broken_request_leaves_behind_harms_nobody(model: Path, paged: bool) -> None:
    """A NaN that is multiplied by a masked weight of zero would still be a NaN."""
    clean, dirty = engine(model, paged, max_requests=2), engine(model, paged, max_requests=2)
    dirty._weights.embed[5] = float("nan")  # type: ignore[index]
    broken = [5] * 120
    for _ in range(3):
        slot, cached = dirty.open(broken)
        output = dirty.step([Extend(slot, broken[cached:])])
        assert bool(output.logits.isnan().all())
        dirty.truncate(slot, 60)
        dirty.release(slot)
    good = [token for token in some_tokens(60, seed=1) if token != 5]
    for sample in (clean, dirty):
        sample.slots = [sample.open(part).slot for part in (good, good[:20])]  # type: ignore[attr-defined]
        for slot, part in zip(sample.slots, (good, good[:20]), strict=True):  # type: ignore[attr-defined]
            sample.step([Extend(slot, part[sample.length(slot) :])])
    steps = [sample.step([Extend(slot, [7]) for slot in sample.slots]) for sample in (clean, dirty)]  # type: ignore[attr-defined]
    torch.testing.assert_close(steps[0].logits, steps[1].logits)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_a_failed_step_leaves_the_cache_as_it_was(
    model: Path, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, fresh = (engine(model, paged, kv_cache=96, max_requests=2) for _ in range(2))
    subject._weights.embed[5] = float("nan")  # type: ignore[index]
    prompts = [[token for token in some_tokens(length) if token != 5] for length in (20, 30)]
    slots = []
    for sample in (subject, fresh):
        slots = [sample.open(prompt).slot for prompt in prompts]
        sample.step([Extend(slot, prompt, "none") for slot, prompt in zip(slots, prompts, strict=True)])
    with monkeypatch.context() as patch:
        patch.setattr("tokenflow.engines.torch.model._mlp", _out_of_memory)
        for _ in range(3):
            with pytest.raises(EngineError, match=r"forward pass of 30 tokens failed: out of memory"):
                subject.step([Extend(slots[0], [5] * 30)])
    assert [subject.length(slot) for slot in slots] == [len(prompt) for prompt in prompts]
    outputs = [sample.step([Extend(slot, [7]) for slot in slots]).logits for sample in (subject, fresh)]
    torch.testing.assert_close(*outputs)
    room = 96 - 16 - sum(len(prompt) + 1 for prompt in prompts)
    more = [token for token in some_tokens(room, seed=3) if token != 5]
    outputs = [sample.step([Extend(slots[1], more)]).logits for sample in (subject, fresh)]
    torch.testing.assert_close(*outputs)


def test_a_step_whose_logits_fail_does_not_count(model: Path) -> None:
    subject = engine(model, paged=False)
    slot, _ = subject.open([1, 2])
    good = subject._weights
    subject._weights = replace(good, head=Linear(torch.zeros(4, 7)))
    with pytest.raises(EngineError, match=r"forward pass of 2 tokens failed: .*shape"):
        subject.step([Extend(slot, [1, 2])])
    assert subject.length(slot) == 0
    subject._weights = good
    assert subject.step([Extend(slot, [1, 2])]).logits.shape == (1, VOCAB)


def _out_of_memory(*_: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_long_feeds_are_attended_in_blocks(model: Path, paged: bool) -> None:
    subject = engine(model, paged)
    tokens = some_tokens(3 * QUERY_BLOCK + 5)
    slot, _ = subject.open(tokens)
    subject.step([Extend(slot, tokens[:7], "none")])
    whole = subject.step([Extend(slot, tokens[7:], "all")]).logits
    subject.truncate(slot, 7)
    single = torch.cat([subject.step([Extend(slot, [token])]).logits for token in tokens[7:]])
    torch.testing.assert_close(whole, single, atol=2e-4, rtol=1e-4)


def test_a_released_row_is_taken_over_only_if_nothing_of_it_is_lost() -> None:
    cache = rows(1000)
    first, _ = cache.open([1] * 50)
    fill(cache, first, [1] * 50)
    cache.release(first)
    assert cache.open([1] * 40 + [2] * 10).cached == 40
    assert cache._held == 90
    assert cache.open([1] * 50 + [3]).cached == 50
    assert cache._held == 90


def test_open_rows_stay_neighbours_and_prefixes_move_out_of_the_way() -> None:
    cache = rows(4000, max_open=4)
    slots = [cache.open([seed]).slot for seed in range(4)]
    for seed, slot in enumerate(slots):
        fill(cache, slot, [seed] * 20)
    for turn in range(4, 30):
        gone = slots.pop(turn % 4)
        cache.release(gone)
        slot, cached = cache.open([turn] * 20)
        assert (slot, cached) == (gone, 0)
        fill(cache, slot, [turn] * 20)
        slots.append(slot)
        recent = [turn - back for back in range(1, 5)]
        assert sum(row.tokens[:1] == [seed] for row in cache._rows for seed in recent) == 4
    assert sorted(slots) == [0, 1, 2, 3]
    assert sum(bool(row.tokens) for row in cache._rows) == 8


def test_moved_keys_and_values_are_those_of_their_tokens() -> None:
    cache = rows(4000, max_open=2)
    for seed in range(1, 9):
        slot, _ = cache.open([seed] * 5)
        fill(cache, slot, [seed] * 5, value=float(seed))
        cache.release(slot)
    for row, block in zip(cache._rows, cache._kv.unbind(1), strict=True):
        assert len(row.tokens) == 5
        assert bool((block[:, :, :5] == row.tokens[0]).all())
    assert sorted(row.tokens[0] for row in cache._rows) == [5, 6, 7, 8]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.booleans()), min_size=1, max_size=8
    )
)
def test_the_longest_prefix_of_all_rows_is_found(prompts: list[tuple[list[int], bool]]) -> None:
    cache = rows(1000, max_open=8)
    seen: list[list[int]] = []
    for prompt, stays in prompts:
        shared = [
            next(
                (i for i, pair in enumerate(zip(old, prompt, strict=False)) if len(set(pair)) == 2), len(old)
            )
            for old in seen
        ]
        slot, cached = cache.open(prompt)
        assert cached == max((min(n, len(prompt) - 1) for n in shared), default=0)
        fill(cache, slot, prompt[cached:])
        seen.append(prompt)
        if not stays:
            cache.release(slot)


def test_the_oldest_prefix_makes_room_first() -> None:
    cache = rows(100)
    prompts = [[token] * 30 for token in range(3)]
    for prompt in prompts:
        slot, _ = cache.open(prompt)
        fill(cache, slot, prompt)
        cache.release(slot)
    slot, cached = cache.open([*prompts[0], 9])
    assert cached == 30
    cache.release(slot)
    slot, _ = cache.open([7] * 20)
    fill(cache, slot, [7] * 20)
    assert [cache.open([*prompt, 9]).cached for prompt in (prompts[0], prompts[2])] == [30, 30]
    assert cache.open([*prompts[1], 9]).cached == 0


def test_a_prefix_that_does_not_fit_beside_its_owner_is_shortened() -> None:
    cache = rows(100)
    slot, _ = cache.open([1] * 80)
    fill(cache, slot, [1] * 80)
    other, cached = cache.open([1] * 60)
    assert cached == 20
    assert cache.length(other) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_touch_memory_for_held_tokens_only_and_give_it_back() -> None:
    cache = rows(16384, max_open=8)
    assert resident_bytes(cache) == 0
    slots = [cache.open([seed]).slot for seed in range(4)]
    for seed, slot in enumerate(slots):
        fill(cache, slot, [seed] * 4000)
    rounding = 4 * mmap.PAGESIZE * SPEC.layers * 2 * SPEC.kv_heads
    assert 0 <= resident_bytes(cache) - 16000 * TOKEN_BYTES <= rounding
    cache.truncate(slots[0], 0)
    cache.truncate(slots[1], 2000)
    assert 0 <= resident_bytes(cache) - 10000 * TOKEN_BYTES <= rounding
    for slot in slots[2:]:
        cache.release(slot)
    assert resident_bytes(cache) >= 10000 * TOKEN_BYTES
    big, _ = cache.open([9])
    fill(cache, big, [9] * 14000)
    assert 0 <= resident_bytes(cache) - 16000 * TOKEN_BYTES <= rounding


def resident_bytes(cache: RowCache) -> int:
    """How much of the arena is in memory."""
    start = cache._kv.data_ptr()
    stop = start + cache._kv.nbytes
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = int(found[1], 16), int(found[2], 16)
            inside = low < stop and high > start
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_rows_end_on_whole_pages() -> None:
    cache = rows(1000)
    assert cache._strides[1] * 4 % mmap.PAGESIZE == 0
    assert cache._strides[1] >= 1000 * SPEC.head_dim


def test_without_reuse_a_released_row_is_empty_at_once() -> None:
    cache = rows(100, reuse=False)
    slot, _ = cache.open([1] * 50)
    fill(cache, slot, [1] * 50)
    cache.release(slot)
    assert float(cache._kv.abs().max()) == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_may_promise_far_more_than_the_machine_has() -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this machine does not overcommit")
    cache = rows(2**22, max_open=64)
    assert cache._kv.nbytes > 2**41
    slot, _ = cache.open([1])
    fill(cache, slot, [1])
    assert cache.length(slot) == 1


def test_address_space_that_cannot_be_had_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("tokenflow.engines.torch.arena.mmap.mmap", refuse)
    with pytest.raises(ModelLoadError, match="lower kv_cache, context_length or max_requests"):
        rows(1000)


def test_pages_of_equal_prompts_are_shared(model: Path) -> None:
    subject = engine(model, paged=True, kv_cache=176, max_requests=8)
    prompt = some_tokens(129)
    slots = []
    for _ in range(3):
        slot, cached = subject.open(prompt)
        subject.step([Extend(slot, prompt[cached:])])
        slots.append(slot)
    assert cached == 128
    used = {block for slot in slots for block in subject._cache._books.of(slot)}  # type: ignore[attr-defined]
    assert len(used) == 8 + 3


def test_the_default_capacity_holds_every_request_in_full_where_memory_allows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine(model, paged=False, max_requests=3).info.kv_capacity == 3 * 256
    monkeypatch.setattr("tokenflow.engines.memory._CPU_MOST", 512 * 100)
    assert engine(model, paged=False, max_requests=3).info.kv_capacity == 100
    assert engine(model, paged=True, max_requests=3).info.kv_capacity == 96


def test_scoring_beyond_the_context_is_refused(model: Path) -> None:
    with pytest.raises(EngineError, match="257 tokens are more than the context of 256"):
        engine(model, paged=False).score(some_tokens(257))
    with pytest.raises(EngineError, match=f"token id {VOCAB} is outside"):
        engine(model, paged=False).score([1, VOCAB])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_memory_behind_a_row_is_always_zero(data: st.DataObject) -> None:
    cache = rows(120, max_open=2)
    held: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "feed", "truncate", "release"]))
        if action == "open" and len(held) < 2:
            prompt = [data.draw(st.integers(1, 2))] * data.draw(st.integers(1, 40))
            slot, cached = cache.open(prompt)
            held[slot] = cached
        elif held:
            slot = data.draw(st.sampled_from(sorted(held)))
            if action == "feed" and held[slot] < 60:
                count = data.draw(st.integers(1, 60 - held[slot]))
                if count + sum(held.values()) <= 120:
                    fill(cache, slot, [1] * count)
                    held[slot] += count
            elif action == "truncate":
                held[slot] = data.draw(st.integers(0, held[slot]))
                cache.truncate(slot, held[slot])
            elif action == "release":
                cache.release(slot)
                del held[slot]
        filled = (cache._kv != 0).sum((0, 2, 4))
        per_token = SPEC.layers * 2 * SPEC.kv_heads * SPEC.head_dim
        lengths = [len(row.tokens) for row in cache._rows]
        assert (filled > 0).sum(1).tolist() == lengths
        assert int(filled.sum()) == per_token * sum(lengths)
        assert all(int(filled[i, :n].min()) == per_token for i, n in enumerate(lengths) if n)
        assert sum(lengths) == cache._held <= cache.capacity
