"""LangChain's ChatOpenAI and OpenAI."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.conftest import MODEL, run

QUESTION = "93*7=?"
ANSWER = "90*7=630, 3*7=21, 630+21=651. Answer: 651"


def chat(base_url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=base_url, api_key="x", temperature=0, **more)


def test_a_chat_is_answered_whole_streamed_and_in_batches(base_url: str) -> None:
    model = chat(base_url)
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert answer.content == ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(ANSWER) + 1
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(str(chunk.content) for chunk in model.stream(QUESTION)) == ANSWER
    assert [reply.content for reply in model.batch([QUESTION, QUESTION])] == [ANSWER] * 2


@pytest.mark.anyio
async def test_a_chat_is_answered_asynchronously(base_url: str) -> None:
    model = chat(base_url, stream_usage=True)
    assert (await model.ainvoke(QUESTION)).content == ANSWER
    chunks = [chunk async for chunk in model.astream(QUESTION)]
    assert "".join(str(chunk.content) for chunk in chunks) == ANSWER
    assert any(chunk.usage_metadata for chunk in chunks)


def test_settings_reach_the_router(base_url: str) -> None:
    model = chat(base_url, max_tokens=5, logprobs=True, extra_body={"params": {"tau": -1.0}})
    answer = model.invoke(QUESTION)
    assert answer.content == ANSWER[:5]
    entries = answer.response_metadata["logprobs"]["content"]
    assert {entry["model"] for entry in entries} == {"llm"}


def test_what_cannot_be_honoured_is_refused_and_not_ignored(base_url: str) -> None:
    class Answer(BaseModel):
        value: int

    with pytest.raises(openai.BadRequestError, match="response_format is not supported"):
        chat(base_url).with_structured_output(Answer, method="json_schema").invoke(QUESTION)


def test_a_conversation_may_have_turns_of_both(base_url: str) -> None:
    turns = [HumanMessage("9*7=?"), AIMessage("63"), HumanMessage(QUESTION)]
    assert chat(base_url).invoke(turns).content == ANSWER


def test_a_text_is_completed_whole_and_streamed(base_url: str) -> None:
    prompt = f"Q: {QUESTION}\nA: "
    model = OpenAI(model=MODEL, base_url=base_url, api_key="x", temperature=0, max_tokens=100)
    assert model.invoke(prompt) == ANSWER
    assert "".join(model.stream(prompt)) == ANSWER
    result = model.generate([prompt, "Q: 9*7=?\nA: "])
    expected = [row["text"] for row in run([{"prompt": prompt}, {"prompt": "Q: 9*7=?\nA: "}])]
    assert [choices[0].text for choices in result.generations] == expected
