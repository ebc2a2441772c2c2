"""The recipe's tokenizer over HTTP."""

from __future__ import annotations

import pytest

from tests.server.conftest import Served

pytestmark = pytest.mark.anyio

TEXT = "Q: 93*7=?"


async def test_a_text_becomes_ids_and_ids_a_text(pair: Served) -> None:
    tokenizer = pair.service.router.tokenizer
    answer = (await pair.post("/tokenize", {"prompt": TEXT, "return_token_strs": True})).json
    assert answer["tokens"] == tokenizer.encode(TEXT)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024
    assert answer["token_strs"][:3] == ["<bos>", "Q", ":"]
    bare = (await pair.post("/tokenize", {"prompt": TEXT, "add_special_tokens": False})).json
    assert bare["tokens"] == answer["tokens"][1:]
    assert bare["token_strs"] is None
    back = await pair.post("/detokenize", {"tokens": bare["tokens"]})
    assert back.json == {"prompt": TEXT}
    special = await pair.post("/detokenize", {"tokens": answer["tokens"]})
    assert special.json == {"prompt": f"<bos>{TEXT}"}


async def test_messages_become_the_ids_that_a_chat_would_send(pair: Served) -> None:
    messages = [{"role": "user", "content": "93*7=?"}]
    answer = (await pair.post("/tokenize", {"messages": messages})).json
    assert answer["tokens"] == await pair.service.router.encode(messages)
    closed = (await pair.post("/tokenize", {"messages": messages, "add_generation_prompt": False})).json
    assert closed["count"] < answer["count"]


async def test_long_texts_and_empty_ones_are_no_exception(pair: Served) -> None:
    long = (await pair.post("/tokenize", {"prompt": "a" * 20_000})).json
    assert long["count"] == 20_001
    back = await pair.post("/detokenize", {"tokens": long["tokens"][1:]})
    assert back.json == {"prompt": "a" * 20_000}
    assert (await pair.post("/tokenize", {"prompt": ""})).json["tokens"] == []
    assert (await pair.post("/detokenize", {"tokens": []})).json == {"prompt": ""}


async def test_what_is_wrong_is_refused(pair: Served) -> None:
    for path, body, message in (
        ("/tokenize", {}, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "give either prompt or messages"),
        ("/tokenize", {"messages": []}, "the prompt is empty"),
        ("/detokenize", {"tokens": [100]}, "tokens must be ids from 0 to 99"),
        ("/detokenize", {"tokens": [-1]}, "tokens must be ids from 0 to 99"),
        ("/detokenize", {"tokens": "a"}, "tokens: expected array, got str"),
    ):
        reply = await pair.post(path, body)
        assert reply.status == 400
        assert message in reply.error["message"]
    assert (await pair.post("/tokenize", {"prompt": "a", "model": "zzz"})).status == 404


async def test_the_tokenizer_tells_what_evaluation_harnesses_look_for(pair: Served) -> None:
    info = (await pair.get("/tokenizer_info")).json
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", "<pad>")
    assert info["model_max_length"] == 1024
    assert "messages" in info["chat_template"]
