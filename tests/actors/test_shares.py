"""Models that share a device hold as many tokens each, or are refused before anything is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.actors.shares import Shares, divide
from tokenflow.errors import ModelLoadError
from tokenflow.wire.messages import Claim, DeviceShare, Grant

GIB, KIB = 2**30, 2**10


def claim(
    weights: int,
    token: int,
    *,
    device: str = "cuda:0",
    usable: int = 72 * GIB,
    cache: int | None = None,
    most: int = 10**9,
) -> Claim:
    return Claim([DeviceShare(device, usable, usable if cache is None else cache, weights, token)], most)


def auto(*models: str) -> dict[str, int | None]:
    return dict.fromkeys(models)


def test_a_device_is_divided_in_proportion_to_bytes_per_token() -> None:
    claims = {"slm": claim(1 * GIB, 112 * KIB), "llm": claim(61 * GIB, 256 * KIB)}
    assert divide(claims, auto("slm", "llm")) == dict.fromkeys(("slm", "llm"), 10 * GIB // (368 * KIB))


def test_a_cache_of_a_given_size_is_subtracted_first() -> None:
    claims = {"slm": claim(1 * GIB, 112 * KIB), "llm": claim(61 * GIB, 256 * KIB)}
    granted = divide(claims, {"slm": 4096, "llm": None})
    assert granted == {"slm": 4096, "llm": (10 * GIB - 4096 * 112 * KIB) // (256 * KIB)}


def test_who_started_first_and_left_less_is_no_matter() -> None:
    early, late = claim(1 * GIB, KIB, usable=72 * GIB), claim(1 * GIB, KIB, usable=71 * GIB)
    assert divide({"a": early, "b": late}, auto("a", "b")) == divide({"a": late, "b": early}, auto("a", "b"))


def test_models_on_devices_of_their_own_do_not_share() -> None:
    claims = {"a": claim(0, KIB, device="cuda:0", usable=4 * GIB), "b": claim(0, KIB, device="cuda:1")}
    assert divide(claims, auto("a", "b")) == {"a": 4 * 2**20, "b": 72 * 2**20}


def test_a_model_over_several_devices_gets_what_the_fullest_has() -> None:
    both = Claim([DeviceShare(f"cuda:{i}", 10 * GIB, 10 * GIB, 0, KIB) for i in (0, 1)], 10**9)
    claims = {"large": both, "small": claim(6 * GIB, KIB, device="cuda:1", usable=10 * GIB)}
    assert divide(claims, auto("large", "small")) == {"large": 2 * 2**20, "small": 2 * 2**20}


def test_no_model_gets_more_than_it_can_use_and_caches_have_a_bound_of_their_own() -> None:
    claims = {
        "a": claim(0, KIB, device="cpu", usable=30 * GIB, cache=8 * GIB, most=1000),
        "b": claim(20 * GIB, KIB, device="cpu", usable=30 * GIB, cache=8 * GIB),
    }
    assert divide(claims, auto("a", "b")) == {"a": 1000, "b": 4 * 2**20}


def test_an_engine_that_claims_nothing_chooses_for_itself() -> None:
    assert divide({"a": Claim([], 0), "b": claim(0, KIB, usable=GIB)}, {"a": None, "b": None}) == {
        "a": None,
        "b": 2**20,
    }


def test_an_impossible_split_is_refused_with_the_arithmetic() -> None:
    claims = {"slm": claim(GIB * 3 // 2, 112 * KIB), "llm": claim(72 * GIB, 256 * KIB)}
    with pytest.raises(ModelLoadError) as caught:
        divide(claims, {"slm": 4096, "llm": None})
    assert str(caught.value) == (
        "cuda:0 cannot hold its models: 72 GiB of it may be used, and they take 73.94 GiB, 256 tokens of "
        "KV cache each 64 MiB more:\n"
        "  slm: weights 1.5 GiB, KV cache 4096 tokens of 112 KiB = 448 MiB\n"
        "  llm: weights 72 GiB, KV cache auto, 256 KiB per token\n"
        "choose a smaller dtype or kv_cache, or another device"
    )


def test_a_split_that_leaves_next_to_nothing_is_refused_too() -> None:
    claims = {"a": claim(72 * GIB - 255 * KIB, KIB)}
    with pytest.raises(ModelLoadError, match="256 tokens of KV cache each 256 KiB more"):
        divide(claims, auto("a"))
    assert divide({"a": claim(72 * GIB - 256 * KIB, KIB)}, auto("a")) == {"a": 256}
    assert divide({"a": claim(72 * GIB - 64 * KIB, KIB, most=64)}, auto("a")) == {"a": 64}


def test_given_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"KV cache 100000000 tokens of 1 KiB = 95\.37 GiB"):
        divide({"a": claim(0, KIB)}, {"a": 10**8})


SHARES = st.builds(
    claim,
    st.integers(0, 20 * GIB),
    st.integers(1, 512 * KIB),
    device=st.sampled_from(["cuda:0", "cuda:1"]),
    usable=st.integers(30 * GIB, 80 * GIB),
    most=st.integers(1, 10**7),
)


@given(
    st.dictionaries(st.sampled_from("abcd"), SHARES, min_size=1),
    st.lists(st.none() | st.integers(1, 10**5), min_size=4),
)
def test_whatever_is_granted_fits(claims: Mapping[str, Claim], sizes: list[int | None]) -> None:
    wanted = dict(zip(claims, sizes, strict=False))
    try:
        granted = divide(claims, wanted)
    except ModelLoadError:
        return
    for device in ("cuda:0", "cuda:1"):
        here = {m: c.shares[0] for m, c in claims.items() if c.shares[0].device == device}
        taken = sum(share.weights + (granted[model] or 0) * share.token for model, share in here.items())
        assert taken <= min((share.usable for share in here.values()), default=0)
        chosen = {
            granted[model]
            for model in here
            if wanted[model] is None and granted[model] != claims[model].most_tokens
        }
        assert len(chosen) <= 1


@pytest.mark.anyio
async def test_nobody_is_answered_before_all_have_claimed_and_a_restart_gets_the_same() -> None:
    shares = Shares(auto("a", "b"))
    first = asyncio.ensure_future(shares.grant("a", claim(0, KIB, usable=GIB)))
    await asyncio.sleep(0)
    assert not first.done()
    assert await shares.grant("b", claim(0, KIB, usable=GIB)) == Grant(2**19)
    assert await first == Grant(2**19)
    assert await shares.grant("a", claim(0, KIB, usable=5)) == Grant(2**19)


@pytest.mark.anyio
async def test_an_impossible_split_is_told_to_everybody() -> None:
    shares = Shares(auto("a", "b"))
    asked = [shares.grant(model, claim(50 * GIB, KIB)) for model in ("a", "b")]
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in errors] == [ModelLoadError] * 2
    assert errors[0] is not errors[1]
