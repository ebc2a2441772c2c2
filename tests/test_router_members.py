"""One model of a recipe alone: writing, and scoring prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes import toy_pair
from tests.toy.engine import toy_logits
from tokenflow.dsl.ir import BudgetIR, RecipeIR
from tokenflow.errors import ContextTooLong, EngineError, InvalidRequest, RouterClosed
from tokenflow.router import Router
from tokenflow.types import Logprob

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50, 60]
SALTS = {"slm": 1, "llm": 2}


def alone(model: str, count: int) -> list[int]:
    """What a toy model writes by itself."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + count and tokens[-1] != 2:
        tokens.append(int(toy_logits(tokens, 128, SALTS[model])[:100].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> RecipeIR:
    pair = toy_pair(tmp_path_factory.mktemp("pair"), slm={"fail_score": "out of memory"})
    return replace(
        pair, scorer="llm", budgets={"llm": BudgetIR(max_tokens=3)}, sampling={"max_tokens": 25, "seed": 3}
    )


@pytest.fixture(scope="module")
async def pair(recipe: RecipeIR) -> AsyncIterator[Router]:
    async with Router(recipe) as router:
        yield router


@pytest.mark.parametrize("model", ["slm", "llm"])
async def test_a_member_alone_writes_what_it_would_without_the_recipe(pair: Router, model: str) -> None:
    both = await pair.generate(PROMPT, max_tokens=30)
    answer = await pair.generate(PROMPT, max_tokens=30, member=model)
    assert set(both.models) == {"slm", "llm"}
    assert answer.token_ids == alone(model, 30)
    assert set(answer.models) == {model}
    assert (answer.usage.handoffs, answer.usage.dropped) == (0, 0)


async def test_a_request_that_leaves_settings_open_gets_those_of_the_recipe(pair: Router) -> None:
    answer = await pair.generate(PROMPT, ignore_eos=True)
    assert (len(answer.tokens), answer.seed) == (25, 3)
    assert len((await pair.generate(PROMPT, max_tokens=7, ignore_eos=True)).tokens) == 7


@pytest.mark.parametrize("count", [2, 300])
async def test_a_prompt_is_scored_by_the_model_that_the_recipe_names(pair: Router, count: int) -> None:
    prompt = [1 + i % 90 for i in range(count)]
    scored = await pair.score(prompt, top=2)
    assert [token.id for token in scored] == prompt
    assert {token.model for token in scored} == {"llm"}
    assert "".join(token.text for token in scored) == pair.tokenizer.decode(prompt)
    assert (scored[0].logprob, scored[0].top_logprobs) == (None, ())
    for end, token in enumerate(scored[1:], 1):
        expected = toy_logits(prompt[:end], 128, 2).log_softmax(-1)
        best = torch.topk(expected, 2)
        assert token.logprob == pytest.approx(expected[token.id].item(), abs=1e-6)
        assert token.top_logprobs == tuple(
            Logprob(*pair) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )


async def test_a_prompt_of_one_token_has_nothing_to_score(pair: Router) -> None:
    (token,) = await pair.score([40])
    assert (token.id, token.logprob) == (40, None)


async def test_an_engine_that_cannot_score_fails_the_request_and_not_its_worker(pair: Router) -> None:
    with pytest.raises(EngineError, match="model 'slm' could not score the prompt: out of memory"):
        await pair.score(PROMPT, member="slm")
    assert (await pair.generate(PROMPT, max_tokens=5, member="slm")).token_ids == alone("slm", 5)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        (PROMPT, {"member": "slim"}, InvalidRequest, "recipe 'toy' has no model 'slim'; it has: slm, llm"),
        (PROMPT, {"top": 21}, InvalidRequest, "top must be an integer from 0 to 20, got 21"),
        ([5] * 2000, {}, ContextTooLong, "the prompt has 2000 tokens, but the recipe's smallest context"),
        ([], {}, InvalidRequest, "the prompt is empty"),
    ],
)
async def test_a_wrong_question_for_scores_is_refused(
    pair: Router, prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        await pair.score(prompt, **options)
    assert message in str(caught.value)


async def test_the_status_tells_what_was_done_and_that_nothing_is_left(pair: Router) -> None:
    before = pair.status
    answer = await pair.generate(PROMPT, max_tokens=20)
    after = pair.status
    assert after.load == (0, 0, 64)
    assert after.longest == 1024
    for old, new in zip(before.models, after.models, strict=True):
        assert new.committed_tokens - old.committed_tokens == answer.usage.by_model[new.name]
        assert new.steps > old.steps
        assert (new.kv_used, new.waiting, new.pending) == (0, 0, 0)
    async with pair.stream(PROMPT, max_tokens=200, ignore_eos=True) as response:
        async for event in response:
            if event.tokens[-1].model == "llm":
                break
        status = pair.status
        small, large = status.models
        assert (status.load.running, small.pending + large.pending) == (1, 1)
        assert small.kv_used == large.kv_used > len(PROMPT)


async def test_without_a_scorer_nobody_guesses_one(recipe: RecipeIR, tmp_path: Path) -> None:
    async with Router(replace(recipe, scorer="")) as router:
        with pytest.raises(InvalidRequest) as caught:
            await router.score(PROMPT)
        assert str(caught.value) == (
            "recipe 'toy' does not say which model scores prompts; "
            'add "scorer: <model>" to it (models: slm, llm)'
        )
        assert len(await router.score(PROMPT, member="llm")) == len(PROMPT)


async def test_a_router_that_does_not_run_has_no_status(recipe: RecipeIR) -> None:
    router = Router(recipe)
    assert router.models == ("slm", "llm")
    assert isinstance(router.down, RouterClosed)
    for ask in (lambda: router.status, lambda: router.tokenizer, lambda: router.load):
        with pytest.raises(RouterClosed):
            ask()
