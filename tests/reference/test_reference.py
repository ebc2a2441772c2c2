from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.reference.cases import DEMO
from tests.reference.record import encode, eval_rows
from tests.reference.reference import (
    NEAR_TIE,
    Decision,
    NearTie,
    Output,
    ReferenceModels,
    Step,
    Trace,
    compare,
    difference,
    drop_and_go_to,
    keep_and_go_to,
    stay,
)
from tests.reference.rules import Alone, RStitch, entropy

EOS = 0
SURE, UNSURE = 12.0, 0.5
"""Heights of the best logit above four others: entropies of about 0.0002 and 0.98."""


def logits(token: int, height: float = SURE) -> Tensor:
    z = torch.zeros(5)
    z[token] = height
    return z


def models(eos: frozenset[int] = frozenset({EOS}), **scripts: list[Tensor]) -> ReferenceModels:
    """Models that answer by position: the number of tokens after a prompt of one."""

    def scripted(script: list[Tensor]) -> Any:
        return lambda ids: Output(script[len(ids) - 1], torch.zeros(0))

    return ReferenceModels({name: scripted(script) for name, script in scripts.items()}, 5, eos)


@pytest.mark.parametrize(
    ("z", "expected"),
    [
        ([0, 0, 0, 0], 1.0),
        ([10, 0, 0, 0], 0.001081),
        ([2, 1, 0, -1], 0.683503),
        ([5, 5, -math.inf, -math.inf], 0.5),
        ([1000, 0, 0, 0], 0.0),
    ],
)
def test_entropy_has_its_known_values(z: list[float], expected: float) -> None:
    assert entropy(torch.tensor(z, dtype=torch.float32)) == pytest.approx(expected, abs=1e-6)


def test_r_stitch_decides_strictly_above_and_hands_back_at_the_threshold() -> None:
    z = torch.zeros(4)
    at = RStitch(entropy(z))
    assert at.decide(Step("slm", z, 0, 0, 1)) == stay(0.0)
    assert at.decide(Step("llm", z, 0, 0, 1)) == keep_and_go_to("slm", 0.0)
    below = RStitch(0.75)
    assert below.decide(Step("slm", z, 0, 0, 1)) == drop_and_go_to("llm", 0.25)
    assert below.decide(Step("llm", z, 0, 0, 1)) == stay(0.25)


def test_uncertain_tokens_are_rewritten_and_the_large_model_hands_back_when_certain() -> None:
    small = [logits(1), logits(2, UNSURE), logits(2, UNSURE), logits(3), logits(EOS)]
    large = [logits(4), logits(3, UNSURE), logits(1), logits(1), logits(1)]
    trace = models(slm=small, llm=large).run(RStitch(0.5), [1], 10)
    assert trace == Trace((1, 3, 1, 3, EOS), ("slm", "llm", "llm", "slm", "slm"), (), "stop", 2, 1)


def test_an_end_of_sequence_that_is_dropped_does_not_end() -> None:
    small = [logits(EOS, UNSURE), logits(2), logits(EOS)]
    large = [logits(3), logits(1), logits(1)]
    trace = models(slm=small, llm=large).run(RStitch(0.5), [1], 10)
    assert trace.tokens == (3, 2, EOS)
    assert trace.models == ("llm", "slm", "slm")


def test_a_kept_token_that_ends_the_response_is_not_handed_back() -> None:
    small, large = [logits(1, UNSURE)], [logits(EOS)]
    assert models(slm=small, llm=large).run(RStitch(0.5), [1], 10) == Trace(
        (EOS,), ("llm",), (), "stop", 1, 1
    )
    assert models(slm=small, llm=[logits(2)]).run(RStitch(0.5), [1], 1) == Trace(
        (2,), ("llm",), (), "length", 1, 1
    )


def test_ids_beyond_the_tokenizer_are_in_the_entropy_but_never_sampled() -> None:
    z = torch.tensor([0.0, 1.0, 0.0, 9.0, 9.0])
    seen: list[Step] = []

    class Spy(Alone):
        def decide(self, step: Step) -> Decision:
            seen.append(step)
            return stay()

    reference = ReferenceModels({"slm": lambda ids: Output(z, z)}, 3, frozenset())
    assert reference.run(Spy("slm"), [1], 2).tokens == (1, 1)
    assert all(torch.equal(step.logits, z) for step in seen)
    assert [(step.position, step.run_length) for step in seen] == [(0, 1), (1, 2)]


def test_near_ties_of_tokens_and_routes_are_recorded_where_they_matter() -> None:
    tie = torch.tensor([0.0, 8.0, 8.0 + NEAR_TIE / 4, 0.0, 0.0])
    rule = RStitch(entropy(tie) - NEAR_TIE / 2)
    trace = models(slm=[tie], llm=[tie, logits(EOS)]).run(rule, [1], 2)
    # The small model's token is dropped, so only its route is near; the large model's token is kept.
    assert [(near.position, near.model, near.kind) for near in trace.near_ties] == [
        (0, "slm", "route"),
        (0, "llm", "route"),
        (0, "llm", "token"),
    ]
    assert all(near.gap < NEAR_TIE for near in trace.near_ties)


def test_a_rule_that_would_never_end_is_an_error() -> None:
    class Bouncing(Alone):
        def decide(self, step: Step) -> Decision:
            return drop_and_go_to("llm" if step.model == "slm" else "slm")

    with pytest.raises(RuntimeError, match="slm is given position 0 again"):
        models(slm=[logits(1)], llm=[logits(1)]).run(Bouncing("slm"), [1], 5)


TRACE = Trace((1, 2, 3), ("slm", "llm", "slm"), (), "stop", 0, 0)


@pytest.mark.parametrize(
    ("tokens", "writers", "position", "reference", "this"),
    [
        ([1, 4, 3], ["slm", "llm", "slm"], 1, "token 2 by llm", "token 4 by llm"),
        ([1, 2, 3], ["slm", "slm", "slm"], 1, "token 2 by llm", "token 2 by slm"),
        ([1, 2], ["slm", "llm"], 2, "token 3 by slm", "ended after 2 tokens"),
        ([1, 2, 3, 4], ["slm", "llm", "slm", "slm"], 3, "ended after 3 tokens", "token 4 by slm"),
    ],
)
def test_a_difference_is_told_by_position(
    tokens: list[int], writers: list[str], position: int, reference: str, this: str
) -> None:
    assert compare(TRACE, tokens, writers) == (
        f"at output position {position} the reference has {reference}, this has {this}"
    )


def test_the_same_tokens_by_the_same_models_are_no_difference() -> None:
    assert compare(TRACE, list(TRACE.tokens), list(TRACE.models)) is None


@pytest.mark.parametrize(("tie_at", "excused"), [(0, True), (1, True), (2, False)])
def test_only_a_near_tie_there_or_before_excuses_a_difference(tie_at: int, excused: bool) -> None:
    tie = NearTie(tie_at, "slm", "token", 1e-6)
    trace = Trace((1, 2, 3), ("slm", "llm", "slm"), (tie,), "stop", 0, 0)
    assert (compare(trace, [1, 4, 4], ["slm"] * 3) is None) == excused
    found = difference(trace, [1, 4, 4], ["slm"] * 3)
    assert found is not None
    assert found.position == 1
    assert found.excuse == (tie if excused else None)
    assert difference(trace, trace.tokens, trace.models) is None


def test_one_model_alone_writes_what_generate_writes() -> None:
    rows = eval_rows(6)
    reference = ReferenceModels.load({"slm": DEMO / "small"})
    network: Any = AutoModelForCausalLM.from_pretrained(DEMO / "small", dtype=torch.float32)
    for prompt in encode(rows, DEMO / "small"):
        trace = reference.run(Alone("slm"), prompt, 60)
        with torch.inference_mode():
            ids = network.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60, pad_token_id=0)
        assert compare(trace, ids[0, len(prompt) :].tolist(), ["slm"] * (ids.shape[1] - len(prompt))) is None
    assert reference.eos == {2}
    assert reference.vocab_limit == 100
