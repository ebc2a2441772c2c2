"""The sampler: right distributions, exact penalties, and rows that never influence each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenflow.engines.sampling import Draw, Sampled, Sampler, peaks, unusable_rows
from tokenflow.random import uniform
from tokenflow.types import SamplingParams

VOCAB = 12
EOS = (2, 5)
INFINITY = float("inf")


def draw(seed: int = 0, prompt: Sequence[int] = (1,), output: Sequence[int] = (), **params: Any) -> Draw:
    return Draw(SamplingParams(**params), seed, [*prompt, *output], len(prompt))


def sampler(limit: int = VOCAB, code: int = 1) -> Sampler:
    return Sampler(code, limit, EOS)


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def distribution(logits: Tensor, one: Draw, limit: int = VOCAB) -> list[float]:
    """What :class:`Sampler` must draw from, written out token by token in float64."""
    p = one.params
    z = {token: float(value) for token, value in enumerate(logits) if token < limit}
    output = list(one.tokens[one.prompt_tokens :])
    if len(output) < p.min_tokens:
        masked = {token: -INFINITY if token in (*EOS, *p.stop_token_ids) else v for token, v in z.items()}
        z = masked if max(masked.values()) > -INFINITY else z
    for token in z:
        z[token] += p.logit_bias.get(token, 0.0)
    for token in set(one.tokens) & set(z):
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token in set(output) & set(z):
        z[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    top = max(z.values())
    if p.greedy:
        best = min(token for token in z if z[token] == top)
        return [float(token == best) for token in range(VOCAB)]
    weights = {token: math.exp((value - top) / p.temperature) for token, value in z.items()}
    if p.top_k > 0:
        least = sorted(weights.values(), reverse=True)[: p.top_k][-1]
        weights = {token: w for token, w in weights.items() if w >= least}
    if p.top_p < 1:
        total, mass, least = sum(weights.values()), 0.0, INFINITY
        for w in sorted(weights.values(), reverse=True):
            if mass >= p.top_p * total:
                break
            mass, least = mass + w, w
        weights = {token: w for token, w in weights.items() if w >= least}
    weights = {token: w for token, w in weights.items() if w >= p.min_p}
    return [weights.get(token, 0.0) / sum(weights.values()) for token in range(VOCAB)]


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-8, 0.5, 1.0, 2.0, 50.0]),
        "top_k": st.integers(-1, VOCAB + 2),
        "top_p": st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 10.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-1.0, 0.0, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB + 3), st.sampled_from([-100.0, -1.0, 3.0, 100.0])),
        "min_tokens": st.integers(0, 15),
        "stop_token_ids": st.sampled_from([(), (1,), (1, 7, 99)]),
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, VOCAB + 3),
    },
)
DRAWS = st.builds(
    lambda params, seed, prompt, output: draw(seed, prompt, output, **params),
    PARAMS,
    st.integers(0, 2**64 - 1),
    TOKENS,
    TOKENS,
)
LIMITS = st.integers(6, VOCAB)


@settings(deadline=None)
@given(st.lists(DRAWS, min_size=1, max_size=6), st.integers(0, 9999), LIMITS)
def test_a_row_gets_the_same_alone_and_in_company(draws: list[Draw], seed: int, limit: int) -> None:
    logits = logits_of(len(draws), seed)
    before = logits.clone()
    together = sampler(limit)(logits, draws)
    assert torch.equal(logits, before), "the raw logits were changed"
    for index, one in enumerate(draws):
        assert sampler(limit)(logits[index : index + 1], [one]) == [together[index]]


@settings(deadline=None, max_examples=200)
@given(DRAWS, st.integers(0, 9999), LIMITS)
def test_what_is_drawn_and_reported_follows_the_written_out_distribution(
    one: Draw, seed: int, limit: int
) -> None:
    one = replace(one, params=replace(one.params, logprobs=True))
    logits = logits_of(1, seed)
    expected = distribution(logits[0], one, limit)
    [sampled] = sampler(limit)(logits, [one])
    assert expected[sampled.token] > 0
    if one.params.greedy:
        assert sampled.logprob is not None
        assert sampled.logprob <= 0
        return
    assert sampled.logprob == pytest.approx(math.log(expected[sampled.token]), abs=2e-5, rel=1e-6)
    # At a temperature near zero a token may be possible in logarithms and impossible in float64.
    reported = [best.logprob for best in sampled.top if best.logprob > -700]
    possible = sorted((p for p in expected if p > math.exp(-700)), reverse=True)[: one.params.top_logprobs]
    assert reported == pytest.approx([math.log(p) for p in possible], abs=2e-5, rel=1e-6)
    assert len({best.id for best in sampled.top}) == len(sampled.top)
    assert all(math.isfinite(best.logprob) for best in sampled.top)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.2, "top_k": 8, "top_p": 0.8, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_draws_have_the_right_frequencies(params: dict[str, Any]) -> None:
    n = 6000
    logits = logits_of(1, seed=3)
    output = [4, 4, 7]
    draws = [draw(seed, (1, 4), output, **params) for seed in range(n)]
    expected = distribution(logits[0], draws[0])
    counts = [0] * VOCAB
    for sampled in sampler()(logits.expand(n, -1), draws):
        counts[sampled.token] += 1
    possible = [token for token in range(VOCAB) if expected[token] > 0]
    assert sum(counts[token] for token in possible) == n
    chi_square = sum((counts[t] - n * expected[t]) ** 2 / (n * expected[t]) for t in possible)
    assert chi_square < CHI_SQUARE_999[len(possible) - 1]


CHI_SQUARE_999 = [0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3]


def test_a_mixed_batch_of_extreme_settings_is_right_in_every_row() -> None:
    settings_of_rows: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1e-8},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"temperature": 0.9, "top_k": 1},
        {"temperature": 0.9, "top_p": 0.0},
        {"temperature": 0.9, "top_p": 1.0},
        {"temperature": 0.9, "top_k": 0},
        {"temperature": 0.9, "top_k": -1},
        {"temperature": 1e-320},
        {"temperature": 1e308},
        {"temperature": 0.9, "min_p": 1.0},
    ]
    logits = logits_of(1, seed=5).expand(len(settings_of_rows), -1)
    results = sampler()(logits, [draw(4, logprobs=True, **params) for params in settings_of_rows])
    best = int(logits[0].argmax())
    assert [results[i].token for i in (0, 1, 4, 5, 9, 11)] == [best] * 6
    assert results[6] == results[7] == results[8]
    for sampled in results:
        assert sampled.logprob is not None
        assert math.isfinite(sampled.logprob)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [4, 7, 9]] = 3.0
    plain, penalised = sampler()(logits, [draw(), draw(output=(4,), presence_penalty=1.0)])
    assert (plain.token, penalised.token) == (4, 7)


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    logits = torch.full((3, VOCAB), -5.0)
    logits[:, 9:] = 50.0
    draws = [
        draw(),
        draw(temperature=1.0, logprobs=True, top_logprobs=20),
        draw(logit_bias={10: 100.0}, repetition_penalty=2.0, prompt=(10, 11)),
    ]
    for seed in range(20):
        results = sampler(limit=9)(logits, [replace(one, seed=seed) for one in draws])
        assert all(sampled.token < 9 for sampled in results)
        assert {best.id for best in results[1].top} == set(range(9))


def test_no_end_before_the_least_number_of_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 2], logits[0, 8] = 9.0, 8.0, 7.0
    one = {"min_tokens": 3, "stop_token_ids": (8,)}
    tokens = [sampler()(logits, [draw(output=[1] * n, **one)])[0].token for n in range(5)]
    assert tokens == [0, 0, 0, 5, 5]
    biased = draw(min_tokens=3, logit_bias={5: 10.0}, temperature=1.0, top_logprobs=VOCAB)
    assert {best.id for best in sampler()(logits, [biased])[0].top} == set(range(VOCAB)) - set(EOS)


def test_an_end_is_drawn_early_if_there_is_nothing_else() -> None:
    logits = torch.full((1, VOCAB), -INFINITY)
    logits[0, 5] = 1.0
    assert sampler()(logits, [draw(min_tokens=3, temperature=1.0)])[0].token == 5


@given(st.integers(0, 2**64 - 1), st.integers(0, 40))
def test_the_draw_depends_on_seed_choice_position_and_model(seed: int, position: int) -> None:
    logits = logits_of(1, vocab=5000, scale=0.1)

    def token(code: int = 1, choice: int = 0, seed: int = seed, position: int = position) -> int:
        one = draw(seed, (3,) * 4, (1,) * position, temperature=1.0, choice=choice)
        return Sampler(code, 5000, EOS)(logits, [one])[0].token

    assert token() == token()
    others = {token(code=2), token(choice=1), token(seed=(seed + 1) % 2**64), token(position=position + 1)}
    assert len(others - {token()}) >= 2


def test_the_prompt_does_not_shift_the_output_position() -> None:
    logits = logits_of(1, vocab=1000, scale=0.1)
    one, other = (
        Sampler(1, 1000, EOS)(logits, [draw(9, prompt, (4, 4), temperature=1.0)])
        for prompt in ((1,), (1, 2, 3))
    )
    assert one == other


def test_a_live_token_list_is_read_at_every_call() -> None:
    tokens = [1]
    one = Draw(SamplingParams(frequency_penalty=2.0), 0, tokens, 1)
    logits = torch.tensor([[0.0, 3.0, 2.5, 1.5]])
    drawn = []
    for _ in range(5):
        drawn.append(Sampler(1, 4, ())(logits, [one])[0].token)
        tokens.append(drawn[-1])
    assert drawn == [1, 2, 3, 1, 2]
    assert one.position == 5


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"logit_bias": {1: 1e308, 2: -1e308}},
        {"logit_bias": dict.fromkeys(range(VOCAB), 1e38)},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1.0, 1e8])
def test_extreme_settings_never_give_nan(params: Mapping[str, Any], temperature: float) -> None:
    logits = logits_of(1, seed=1)
    logits[0, 3] = -INFINITY
    logits[0, 4] = 3e38
    one = draw(prompt=(0, 1, 2, 3, 4), output=(3, 4, 5), temperature=temperature, logprobs=True, **params)
    [sampled] = sampler()(logits, [one])
    assert sampled.token != 3
    assert sampled.logprob is not None
    assert math.isfinite(sampled.logprob)


def test_a_flat_distribution_needs_more_than_the_first_probabilities() -> None:
    vocab = 4000
    flat, peaked = torch.linspace(0.0, 0.001, vocab), torch.linspace(0.0, 0.001, vocab)
    peaked[7] = 50.0
    params = SamplingParams(temperature=1.0, top_p=0.5)
    tokens = []
    for seed in range(300):
        draws = [Draw(params, seed, [], 0)] * 2
        wide, narrow = Sampler(1, vocab, ())(torch.stack((flat, peaked)), draws)
        assert narrow.token == 7
        tokens.append(wide.token)
    assert min(tokens) >= vocab // 2 - 2
    assert max(tokens) > vocab * 0.9
    assert min(tokens) < vocab * 0.6


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_draw_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    monkeypatch.setattr("tokenflow.engines.sampling.uniform", lambda *_: number)
    for seed in range(200):
        logits = logits_of(1, seed, scale=0.3)
        logits[0, [0, 1, 10, 11]] = -INFINITY
        [sampled] = sampler()(logits, [draw(temperature=1.0)])
        assert sampled.token == (2 if number == 0 else 9)


def test_logprobs_of_a_greedy_token_are_those_of_temperature_one() -> None:
    logits = logits_of(1, seed=8)
    [sampled] = sampler()(logits, [draw(temperature=0.5, top_k=1, logprobs=True, top_logprobs=3)])
    expected = logits[0].log_softmax(-1)
    assert sampled.logprob == pytest.approx(float(expected.max()), abs=1e-6)
    assert [best.id for best in sampled.top] == expected.topk(3).indices.tolist()


def test_nothing_is_reported_that_was_not_asked_for() -> None:
    logits = logits_of(3)
    plain, warm, top = sampler()(logits, [draw(), draw(temperature=1.0), draw(top_logprobs=2)])
    assert plain == Sampled(plain.token, None, ())
    assert warm == Sampled(warm.token, None, ())
    assert len(top.top) == 2


@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, 1.5, -3e38, -INFINITY, INFINITY, float("nan")]), min_size=6, max_size=6
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 6),
)
def test_rows_without_a_token_to_draw_are_found(rows: list[list[float]], limit: int) -> None:
    expected = [
        index
        for index, row in enumerate(rows)
        if any(math.isnan(v) or v == INFINITY for v in row) or not any(v > -INFINITY for v in row[:limit])
    ]
    logits = torch.tensor(rows)
    assert unusable_rows(logits, limit, peaks(logits, limit).logits) == set(expected)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.5, 7.25, -INFINITY]), min_size=6, max_size=6), max_size=5),
    st.integers(1, 6),
)
def test_peaks_are_the_largest_logits_and_the_lowest_ids_that_have_them(
    rows: list[list[float]], limit: int
) -> None:
    found = peaks(torch.tensor(rows).view(-1, 6), limit)
    assert found.logits == [max(row[:limit]) for row in rows]
    assert found.ids == [row.index(max(row[:limit])) for row in rows]


@pytest.mark.parametrize("excluded", [(), (3,)])
def test_a_known_peak_is_drawn_as_if_it_had_been_looked_for(excluded: tuple[int, ...]) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 99.0], [5.0, 1.0, 5.0, 4.0, 99.0]])
    sampler = Sampler(1, 4, (), excluded)
    warm = [Draw(SamplingParams(temperature=t), 7, [0], 1) for t in (0.0, 1.5)]
    best = peaks(logits, 4).ids
    for draws in (warm, warm[::-1], warm[:1] * 2):
        assert sampler(logits, draws, best) == sampler(logits, draws)
    assert best == [3, 0]


def test_numpy_agrees_that_the_inverse_of_the_cumulative_sum_is_drawn() -> None:
    """An independent inversion with the same random number."""
    logits = logits_of(1, seed=11, vocab=500, scale=1.0)
    mass = np.exp(logits[0].double().numpy() - float(logits.max())).cumsum()
    for seed in range(50):
        [sampled] = Sampler(3, 500, ())(logits, [draw(seed, output=(1, 1), temperature=1.0)])
        point = uniform(seed, 0, 2, 3, "token") * mass[-1]
        assert sampled.token == int(np.searchsorted(mass, point, side="right"))


def test_a_draw_among_a_few_is_one_with_top_k() -> None:
    warm, narrow, cold = draw(temperature=1.0), draw(temperature=1.0, top_k=3), draw()
    assert warm.among(5).params.top_k == 5
    assert warm.among(5).tokens is warm.tokens
    assert narrow.among(5) is narrow
    assert narrow.among(2).params.top_k == 2
    assert cold.among(1) is cold
