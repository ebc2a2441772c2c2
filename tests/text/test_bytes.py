"""The vocabulary of recipes without models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenflow.text.bytes import byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text().filter(lambda text: "<|end|>" not in text and text.isprintable()) | st.just("é\n\t ~ \x00"))
def test_the_ids_of_a_text_are_its_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert bytes(ids) == text.encode()
    assert TOKENIZER.decode(ids) == text


def test_one_more_id_ends_a_response_and_has_no_text() -> None:
    assert len(TOKENIZER) == 257
    assert TOKENIZER.eos_ids == (256,)
    assert TOKENIZER.decode([104, 105, 256]) == "hi"


def test_a_conversation_becomes_a_text() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert bytes(TOKENIZER.render(chat)).decode() == "user: hi\nassistant: "
