from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.demo import evaluate, heads, policies
from recipes.demo.decoder import Decoder
from recipes.demo.policies import Choice, Response, Step
from recipes.demo.scores import score
from recipes.demo.tasks import Problem, load_eval
from recipes.demo.tokenizer import prompt_ids

HERE = Path(policies.__file__).parent


@pytest.fixture(scope="module")
def small() -> Decoder:
    return Decoder(HERE / "small")


@pytest.fixture(scope="module")
def large() -> Decoder:
    return Decoder(HERE / "large")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return load_eval(HERE / "eval.jsonl", 9)


@pytest.fixture(scope="module")
def large_alone(large: Decoder, problems: list[Problem]) -> list[Response]:
    return policies.simulate(problems, policies.small_only, large)


def test_the_decoder_computes_what_transformers_computes(large: Decoder) -> None:
    reference = AutoModelForCausalLM.from_pretrained(HERE / "large", dtype=torch.float32).eval()
    prompts = [prompt_ids("93*7=?"), prompt_ids("Count the letter l in djblx.")]
    features = large.prefill(prompts, 64)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            out = reference(torch.tensor([prompt]), output_hidden_states=True)
        torch.testing.assert_close(features.logits[row], out.logits[0, -1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(features.hidden[row], out.hidden_states[-1][0, -1], atol=1e-4, rtol=1e-4)


def test_rows_at_different_positions_extend_as_each_would_alone(small: Decoder) -> None:
    prompts = [prompt_ids("93*7=?"), prompt_ids("Count the letter l in djblx.")]
    tokens, positions = torch.tensor([20, 30]), torch.tensor([len(prompt) for prompt in prompts])
    small.prefill(prompts, 64)
    together = small.extend(tokens, positions).logits
    for row, prompt in enumerate(prompts):
        small.prefill([prompt], 64)
        alone = small.extend(tokens[row : row + 1], positions[row : row + 1]).logits
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)


def test_the_small_model_alone_scores_as_published_in_results(small: Decoder) -> None:
    problems = load_eval(HERE / "eval.jsonl", 200)
    responses = policies.simulate(problems, policies.small_only, small)
    total = score([response.outcome(problem) for response, problem in zip(responses, problems, strict=True)])
    assert (total.accuracy, total.exact, total.share) == (0.58, 0.505, 0)


def test_the_oracle_writes_the_large_models_text(
    small: Decoder, large: Decoder, problems: list[Problem], large_alone: list[Response]
) -> None:
    responses = policies.simulate(problems, policies.oracle, small, large)
    assert [r.text for r in responses] == [r.text for r in large_alone]
    assert 0 < sum(r.large for r in responses) < 0.1 * sum(len(r.ids) for r in responses)


def test_r_stitch_spans_from_the_small_model_to_the_large_one(
    small: Decoder, large: Decoder, problems: list[Problem], large_alone: list[Response]
) -> None:
    never = policies.simulate(problems, policies.r_stitch(1), small, large)
    alone = policies.simulate(problems, policies.small_only, small)
    assert [(r.ids, r.large, r.handoffs) for r in never] == [(r.ids, 0, 0) for r in alone]
    always = policies.simulate(problems, policies.r_stitch(-1), small, large)
    assert [(r.ids, r.large, r.handoffs) for r in always] == [(r.ids, len(r.ids), 1) for r in large_alone]


def test_answers_do_not_depend_on_the_batch_they_are_in(
    small: Decoder, large: Decoder, problems: list[Problem]
) -> None:
    together = policies.simulate(problems, policies.r_stitch(0.03), small, large)
    apart = policies.simulate(problems, policies.r_stitch(0.03), small, large, batch=4)
    assert [(r.ids, r.large, r.handoffs) for r in together] == [(r.ids, r.large, r.handoffs) for r in apart]


def test_entropy_is_0_where_one_token_is_certain_and_1_where_none_stands_out() -> None:
    logits = torch.zeros(2, 128)
    logits[0, 7] = 200.0
    assert policies.normalised_entropy(logits).tolist() == pytest.approx([0, 1])
    two = torch.full((1, 128), -1e4)
    two[0, :2] = 0
    assert policies.normalised_entropy(two).item() == pytest.approx(math.log(2) / math.log(128))


def step(logits: torch.Tensor, hidden: torch.Tensor | None = None) -> Step:
    tokens = logits.argmax(-1)
    hidden = torch.zeros(len(logits), 64) if hidden is None else hidden
    return Step(hidden, logits, tokens, logits, tokens, torch.zeros(len(logits), dtype=torch.bool))


def test_one_token_rules_never_hold_a_request() -> None:
    choice: Choice = policies.confidence_below(0.9)(step(torch.tensor([[0.0, 0.0], [0.0, 9.0]])))
    assert choice.large.tolist() == [True, False]
    assert choice.held.tolist() == [False, False]


def test_co_llm_defers_where_the_probability_exceeds_eta() -> None:
    rule = heads.co_llm(1, 0.5)
    assert rule(step(torch.tensor([[5.0, -0.1], [5.0, 0.0], [5.0, 0.1]]))).large.tolist() == [
        False,
        False,
        True,
    ]


def test_the_shipped_heads_load_and_find_most_divergent_tokens(
    small: Decoder, problems: list[Problem], large_alone: list[Response]
) -> None:
    chosen = json.loads((HERE / "heads/heads.json").read_text())
    r2r = heads.r2r(
        heads.load_r2r(HERE / "heads/r2r/default_router.pt", small.embedding), chosen["r2r"]["threshold"]
    )
    citer = heads.citer(heads.load_citer(HERE / "heads/citer/citer_mlp.pth"), chosen["citer"]["threshold"])
    asked = {"r2r": 0, "citer": 0}
    divergent = positions = 0
    for problem, response in zip(problems, large_alone, strict=True):
        prompt = prompt_ids(problem.question)
        ids = torch.tensor([prompt + response.ids])
        small.open(*ids.shape)
        features = small.forward(ids, torch.arange(ids.shape[1])[None])
        at = slice(len(prompt) - 1, -1)
        seen = step(features.logits[0, at], features.hidden[0, at])
        differs = seen.small_tokens != torch.tensor(response.ids)
        with torch.no_grad():
            for name, rule in (("r2r", r2r), ("citer", citer)):
                asked[name] += int((rule(seen).large & differs).sum())
        divergent += int(differs.sum())
        positions += len(differs)
    assert 0.01 < divergent / positions < 0.1
    assert all(found > 0.9 * divergent for found in asked.values())


def test_both_files_of_the_r2r_head_hold_the_same_head(small: Decoder) -> None:
    slim, full = (
        heads.load_r2r(HERE / "heads/r2r" / name, small.embedding).state_dict()
        for name in ("default_router.pt", "default_router_all.pt")
    )
    assert slim.keys() == full.keys()
    assert all(torch.equal(slim[name], full[name]) for name in slim)


def test_every_setting_of_the_results_page_exists() -> None:
    results = (HERE / "results.md").read_text()
    assert [setting.name for setting in evaluate.settings() if f"| {setting.name} " not in results] == []
