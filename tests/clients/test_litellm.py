"""LiteLLM, as ``openai/`` and as ``hosted_vllm/``."""

from __future__ import annotations

import litellm
import pytest

from tests.clients.conftest import MODEL

MESSAGES = [{"role": "user", "content": "93*7=?"}]
ANSWER = "90*7=630, 3*7=21, 630+21=651. Answer: 651"


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_chat_is_answered_whole_and_streamed(base_url: str, provider: str) -> None:
    settings = {"model": f"{provider}/{MODEL}", "api_base": base_url, "api_key": "x", "messages": MESSAGES}
    answer = litellm.completion(**settings, temperature=0, max_tokens=100)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.completion_tokens == len(ANSWER) + 1
    stream = litellm.completion(**settings, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


@pytest.mark.anyio
async def test_a_chat_is_answered_asynchronously(base_url: str) -> None:
    answer = await litellm.acompletion(
        model=f"openai/{MODEL}", api_base=base_url, api_key="x", messages=MESSAGES, n=2, temperature=0
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2


def test_a_text_is_completed(base_url: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=base_url,
        api_key="x",
        prompt="Q: 93*7=?\nA: ",
        max_tokens=100,
        temperature=0,
    )
    assert answer.choices[0].text == ANSWER


def test_one_model_of_the_recipe_answers_under_its_own_name(base_url: str) -> None:
    answer = litellm.completion(
        model=f"openai/{MODEL}/llm", api_base=base_url, api_key="x", messages=MESSAGES, max_tokens=5
    )
    assert answer.model == f"{MODEL}/llm"
    assert answer.choices[0].message.content == ANSWER[:5]


def test_errors_are_the_right_exceptions(base_url: str) -> None:
    settings = {"api_base": base_url, "api_key": "x", "messages": MESSAGES, "max_retries": 0}
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/nobody", **settings)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model=f"openai/{MODEL}", temperature=-1, **settings)
    with pytest.raises(litellm.ContextWindowExceededError):
        long = [{"role": "user", "content": "7" * 3000}]
        litellm.completion(model=f"openai/{MODEL}", **{**settings, "messages": long})
