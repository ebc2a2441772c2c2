"""Names of tokens among the best: none may hide another."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from tests.text.conftest import save, word_level
from tokenflow.server.logprobs import Offsets, Speller, chat_logprobs, text_logprobs
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.types import Logprob, Token


def tokenizer(folder: Path) -> Tokenizer:
    """Ids 1 and 2 decode to the same text, and so do 3 and 4."""
    backend = word_level(["<unk>", "a", "▁a", "b"])
    backend.add_tokens([AddedToken("b ", rstrip=False)])
    made = Tokenizer.load(save(folder, backend, {}))
    made._pieces.update({1: b"a", 2: b"a", 3: b"\xe6", 4: b"\xe6"})
    return made


def test_two_ids_of_one_text_have_two_names(tmp_path: Path) -> None:
    speller = Speller(tokenizer(tmp_path))
    best = tuple(Logprob(token, -float(token)) for token in (1, 2, 3, 4, 9))
    for token in (1, 2, 3, 4, 9):
        written = Token(token, "a", "slm", -float(token), best)
        logprobs = text_logprobs([written], speller, Offsets(speller))
        (top,) = logprobs["top_logprobs"]
        assert len(top) == 5
        assert sorted(top.values()) == sorted(item.logprob for item in best)
        assert top[logprobs["tokens"][0]] == -float(token)
    assert speller.text(3) == r"bytes:\xe6"
    assert speller.bytes(3) == [0xE6]
    assert (speller.text(9), speller.bytes(9)) == ("token_id:9", [])


@pytest.mark.parametrize("logprob", [float("-inf"), -1e30, -9999.5])
def test_what_json_cannot_write_is_a_very_small_number(tmp_path: Path, logprob: float) -> None:
    speller = Speller(tokenizer(tmp_path))
    token = Token(1, "a", "slm", logprob, (Logprob(1, logprob), Logprob(3, float("-inf"))))
    logprobs = text_logprobs([token], speller, Offsets(speller))
    assert logprobs["token_logprobs"] == [-9999.0]
    assert set(logprobs["top_logprobs"][0].values()) == {-9999.0}
    (entry,) = chat_logprobs([token], speller)["content"]
    assert entry["logprob"] == entry["top_logprobs"][1]["logprob"] == -9999.0


def test_a_token_begins_where_the_first_character_that_it_is_a_part_of_does(tmp_path: Path) -> None:
    """Which others may complete, or nobody; an id that the tokenizer lacks has no text."""
    made = tokenizer(tmp_path)
    made._pieces.update({1: b"a", 2: b"b\xe6", 3: b"\xbc", 4: b"\xa2c"})
    ids = [1, 1, 2, 3, 4, 1, 9, 1, 2, 1, 1]
    text = "aab\u6f22caab\ufffdaa"
    places = Offsets(Speller(made), 10)
    offsets = [places.next(token) for token in ids]
    assert offsets == [10, 11, 12, 13, 13, 15, 16, 16, 17, 19, 20]
    assert offsets[-1] == 10 + len(text) - 1
