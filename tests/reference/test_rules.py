"""The reference's rules by hand, over models that answer by script."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.reference import (
    Decision,
    Output,
    ReferenceModels,
    Step,
    drop_and_go_to,
    keep_and_go_to,
    stay,
)
from tests.reference.rules import (
    Below,
    Budgeted,
    Cascade,
    Chance,
    CoLLM,
    Deferral,
    Ensemble,
    Momentum,
    Reaching,
    Rolling,
    StepBoundary,
    TagCall,
    ThinkAnswer,
    Turns,
    Verdict,
    aleatoric,
    confidence,
    entropy_nats,
    margin,
)
from tokenflow.random import DRAW, uniform

EOS = 0
SURE, UNSURE = 12.0, 0.5


def logits(token: int, height: float = SURE) -> Tensor:
    z = torch.zeros(5)
    z[token] = height
    return z


def models(**scripts: list[Tensor]) -> ReferenceModels:
    """Models that answer by position: the number of tokens after a prompt of one."""

    def scripted(script: list[Tensor]) -> Any:
        return lambda ids: Output(script[len(ids) - 1], torch.zeros(0))

    return ReferenceModels({n: scripted(script) for n, script in scripts.items()}, 5, frozenset({EOS}))


def step(model: str = "slm", height: float = SURE, token: int = 1, **more: Any) -> Step:
    return Step(model, logits(token, height), token, **{"position": 3, "run_length": 2, **more})


def forget(decision: Decision) -> tuple[str | None, bool]:
    return decision.to, decision.keep


def test_signals_have_their_known_values() -> None:
    z = torch.tensor([2.0, 1.0, 0.0, -1.0])
    assert entropy_nats(z) == pytest.approx(0.683503 * math.log(4), abs=1e-5)
    assert confidence(z) == pytest.approx(0.643914, abs=1e-5)
    assert margin(z) == pytest.approx(0.643914 - 0.236883, abs=1e-5)
    # Ten equal pieces of evidence 2: psi(21) - psi(3).
    assert aleatoric(torch.full((12,), 2.0)) == pytest.approx(3.020524 - 0.922784, abs=1e-5)


def test_deferral_is_strict_or_not_as_published_and_returns_after_n() -> None:
    z = torch.zeros(5)
    at = Step("slm", z, 0, 0, 1)
    assert not Below(confidence, confidence(z))(at).wanted
    assert Reaching(entropy_nats, entropy_nats(z))(at).wanted
    assert CoLLM(1, 0.5)(at) == Verdict(False, 0.0)
    rule = Deferral(Reaching(entropy_nats, 1.0), n=3)
    assert forget(rule.decide(step(height=UNSURE))) == ("llm", False)
    assert forget(rule.decide(step())) == (None, True)
    assert [forget(rule.decide(step("llm", run_length=n))) for n in (1, 2, 3)] == [
        (None, True),
        (None, True),
        ("slm", True),
    ]


def test_chance_goes_by_the_number_of_the_next_position() -> None:
    assert Chance(0.2)(step(draw=0.19)).wanted
    assert not Chance(0.2)(step(draw=0.2)).wanted


def test_an_ensemble_draws_the_first_writer_too_and_stays_within_the_weights() -> None:
    rule = Ensemble({"a": 1, "b": 2, "c": 1})
    assert [rule.first(number) for number in (0.0, 0.249, 0.25, 0.749, 0.75, 0.999)] == list("aabbcc")
    assert rule.decide(step("b", draw=0.5)) == stay()
    assert rule.decide(step("b", draw=0.9)) == keep_and_go_to("c")


def test_sampling_lays_the_tokens_out_in_the_order_of_their_ids() -> None:
    reference = models(slm=[])
    z = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1]).log()
    assert [reference.draw("slm", z, 1.0, u)[0] for u in (0.05, 0.1001, 0.29, 0.3001, 0.95)] == [
        0,
        1,
        1,
        2,
        4,
    ]
    assert reference.draw("slm", z, 1.0, 0.31)[1] == pytest.approx(0.01, abs=1e-6)
    assert reference.draw("slm", z, 1.0, 0.69)[1] == pytest.approx(0.01, abs=1e-6)


def test_a_sampled_ensemble_uses_the_numbers_of_seed_position_and_model() -> None:
    flat = [torch.zeros(5)] * 9
    reference = ReferenceModels(models(a=flat, b=flat).models, 5, frozenset())
    weights = {"a": 0.5, "b": 0.5}
    trace = reference.run(Ensemble(weights), [1], 8, seed=7, temperature=1.0)
    expected_models = ["a" if uniform(7, 0, n, 0, DRAW) < 0.5 else "b" for n in range(8)]
    expected = [
        int(5 * uniform(7, 0, n, 1 + (model == "b"), "token")) for n, model in enumerate(expected_models)
    ]
    assert (list(trace.tokens), list(trace.models)) == (expected, expected_models)
    assert {"a", "b"} == set(expected_models)


def test_a_cascade_rewrites_upwards_and_hands_down_what_it_has_kept() -> None:
    rule = Cascade(0.03, 0.1)
    heights = {"sure": 12.0, "doubt": 5.5, "unsure": 0.5}
    decisions = {
        (model, name): forget(rule.decide(step(model, height)))
        for model in ("slm", "mid", "llm")
        for name, height in heights.items()
    }
    assert decisions == {
        ("slm", "sure"): (None, True),
        ("slm", "doubt"): ("mid", False),
        ("slm", "unsure"): ("llm", False),
        ("mid", "sure"): ("slm", True),
        ("mid", "doubt"): (None, True),
        ("mid", "unsure"): ("llm", False),
        ("llm", "sure"): ("slm", True),
        ("llm", "doubt"): ("mid", True),
        ("llm", "unsure"): (None, True),
    }


def test_turns_are_taken_in_order() -> None:
    one = [logits(1)] * 8
    trace = models(a=one, b=one, c=one).run(Turns({"a": 3, "b": 2, "c": 1}), [1], 8)
    assert "".join(trace.models) == "aaabbcaa"


def test_thinking_ends_after_the_whole_tag() -> None:
    rule = ThinkAnswer((2, 3))
    assert rule.decide(step("llm", token=3, output=(1, 2))) == keep_and_go_to("slm")
    assert rule.decide(step("llm", token=3, output=(1, 1))) == stay()
    assert rule.decide(step("slm", token=3, output=(1, 2))) == stay()


def test_a_tag_calls_for_n_tokens() -> None:
    one, tag = logits(1), logits(2)
    trace = models(slm=[one, tag, one, one, one, one], llm=[one] * 6).run(TagCall((2,), 2), [1], 6)
    assert trace.models == ("slm", "slm", "llm", "llm", "slm", "slm")


def test_a_step_is_judged_by_its_first_token_and_the_answer_is_the_large_models() -> None:
    rule = StepBoundary(1.0, (4,), (3, 3), longest=3)
    uncertain = UNSURE
    assert forget(rule.decide(step(height=uncertain, output=()))) == ("llm", False)
    assert forget(rule.decide(step(height=uncertain, output=(1, 4)))) == ("llm", False)
    assert forget(rule.decide(step(height=uncertain, output=(4, 1)))) == (None, True)
    assert forget(rule.decide(step(token=3, output=(1, 3)))) == ("llm", False)
    ended = step("llm", token=4, output=(1, 1))
    assert rule.decide(ended) == keep_and_go_to("slm")
    assert rule.decide(step("llm", token=1, output=(1, 1), run_length=3)) == keep_and_go_to("slm")
    begun = step("llm", token=3, output=(1, 3))
    assert rule.decide(begun) == stay()
    assert rule.decide(step("llm", token=4, output=(3, 3), earlier=(begun,))) == stay()


def test_momentum_has_hysteresis() -> None:
    rule = Momentum(1.0, 0.35, 0.75)
    sure, unsure = step(), step(height=UNSURE)
    # Averages: 0.3, 0.51, 0.657.
    assert rule(step()).wanted
    assert not rule(step(earlier=(sure,), writers=("slm",))).wanted
    assert rule(step(earlier=(sure,), writers=("llm",))).wanted
    assert rule(step(height=UNSURE, earlier=(sure,), writers=("slm",))).wanted
    assert not rule(step(earlier=(sure,) * 3, writers=("llm",))).wanted
    assert rule(step(earlier=(sure,) * 3 + (unsure,), writers=("llm",))).wanted


def test_a_rolling_mean_counts_after_the_large_model_only() -> None:
    rule = Rolling(0.5)
    unsure = step(height=UNSURE)
    assert rule(step(height=UNSURE, writers=("slm",))).wanted
    assert not rule(step(earlier=(unsure, unsure), writers=("slm",))).wanted
    assert rule(step(earlier=(unsure, unsure), writers=("llm",))).wanted
    assert not rule(step(earlier=(unsure, unsure, step(), step()), writers=("llm",))).wanted


def test_a_budget_keeps_the_route_away_and_ends_a_run() -> None:
    unsure, sure = [logits(1, UNSURE)] * 10, [logits(2)] * 10
    stubborn = Deferral(Reaching(entropy_nats, 1.0), n=100)
    by_count = models(slm=unsure, llm=sure).run(Budgeted(stubborn, tokens=3), [1], 6)
    assert by_count.models == ("llm", "llm", "llm", "slm", "slm", "slm")
    assert (by_count.handoffs, by_count.dropped) == (2, 1)
    by_share = models(slm=unsure, llm=sure).run(Budgeted(stubborn, share=0.25), [1], 9)
    assert by_share.models == ("slm", "slm", "slm", "llm", "slm", "slm", "slm", "llm", "slm")
    assert drop_and_go_to("llm") == Budgeted(stubborn).decide(unsure_step())._replace(gap=math.inf)


def unsure_step() -> Step:
    return step(height=UNSURE)


def test_speculation_keeps_what_the_large_model_would_write_and_corrects_the_first_difference() -> None:
    one, two, three = logits(1), logits(2), logits(3)
    small = [one, two, two, one, one, one, one]
    large = [one, two, three, one, one, logits(EOS), one]
    trace = models(slm=small, llm=large).speculate([1], 20, 4, "slm", "llm")
    # Round 1: 1 2 2 1, of which the last two go; round 2: 1 1 1 1, of which the last two go.
    assert trace.tokens == (1, 2, 3, 1, 1, EOS)
    assert trace.models == ("slm", "slm", "llm", "slm", "slm", "llm")
    assert (trace.finish_reason, trace.handoffs, trace.dropped) == ("stop", 3, 4)


def test_speculation_ends_inside_a_draft() -> None:
    one, end = logits(1), logits(EOS)
    script = [one, end, one, one, one, one]
    trace = models(slm=script, llm=script).speculate([1], 20, 4, "slm", "llm")
    assert (trace.tokens, trace.models, trace.dropped) == ((1, EOS), ("slm", "slm"), 0)
    long = [one] * 9
    trace = models(slm=long, llm=long).speculate([1], 3, 4, "slm", "llm")
    assert (trace.tokens, trace.finish_reason) == ((1, 1, 1), "length")
