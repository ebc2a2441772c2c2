from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from recipes.demo import tokenizer
from recipes.demo.co_llm import DEFER, DEFER_ID

HERE = Path(tokenizer.__file__).parent
CHECKPOINTS = ["small", "mid", "large", "heads/collm_small"]


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n")))
def test_text_survives_encoding_and_decoding(text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([tokenizer.BOS, *ids, tokenizer.EOS, tokenizer.LOGITS_WIDTH - 1]) == text


def test_an_unknown_character_is_one_unknown_token() -> None:
    assert tokenizer.encode("aé") == [tokenizer.IDS["a"], tokenizer.UNK]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_shipped_tokenizers_agree_with_the_code(name: str) -> None:
    shipped = AutoTokenizer.from_pretrained(HERE / name)
    built = tokenizer.transformers_tokenizer([DEFER] if "collm" in name else [])
    assert shipped.get_vocab() == built.get_vocab()
    question = "What is 12 times 7?"
    messages = [{"role": "user", "content": "ignored"}, {"role": "user", "content": question}]
    ids = shipped.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.prompt_ids(question)
    assert shipped("Q: a\nA: ").input_ids == [tokenizer.BOS, *tokenizer.encode("Q: a\nA: ")]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_shipped_files_are_those_that_saving_writes(name: str, tmp_path: Path) -> None:
    tokenizer.transformers_tokenizer([DEFER] if "collm" in name else []).save_pretrained(tmp_path)
    assert json.loads((HERE / name / "tokenizer.json").read_text()) == json.loads(
        (tmp_path / "tokenizer.json").read_text()
    )


def test_the_defer_token_has_the_first_free_id() -> None:
    assert AutoTokenizer.from_pretrained(HERE / "heads/collm_small").convert_tokens_to_ids(DEFER) == DEFER_ID
