from __future__ import annotations

from pathlib import Path

import pytest

from tests.text.conftest import DEMO, save, word_level
from tokenflow.errors import TokenizerMismatch
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.text.vocabulary import require_same_vocabulary

LETTERS = ["<unk>", "a", "b", "c"]


def tokenizers(root: Path, **vocabularies: list[str]) -> dict[str, Tokenizer]:
    return {
        name: Tokenizer.load(save(root / name, word_level(tokens), {}))
        for name, tokens in vocabularies.items()
    }


def test_models_with_one_vocabulary_share_all_ids() -> None:
    models = {name: Tokenizer.load(DEMO / name) for name in ("small", "mid", "large")}
    assert require_same_vocabulary(models) == 100
    assert require_same_vocabulary({"slm": models["small"]}) == 100


def test_ids_beyond_the_shortest_vocabulary_are_not_shared(tmp_path: Path) -> None:
    models = tokenizers(tmp_path, slm=[*LETTERS, "<|defer|>"], llm=LETTERS, xl=[*LETTERS, "<pad>", "<pad2>"])
    assert require_same_vocabulary(models) == 4


def test_permuted_ids_of_equal_size_are_refused_with_the_first_that_differs(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMismatch) as caught:
        require_same_vocabulary(tokenizers(tmp_path, slm=LETTERS, mid=LETTERS, llm=["<unk>", "a", "c", "b"]))
    assert str(caught.value) == (
        "models slm and llm do not share one vocabulary: id 2 is 'b' in slm and 'c' in llm (4 and 4 ids); "
        "the models of a recipe exchange token ids, so choose models with the same tokenizer"
    )


def test_an_id_that_one_model_leaves_out_is_a_difference(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models as kinds

    gap = Backend(kinds.WordLevel({"<unk>": 0, "a": 1, "c": 3}, unk_token="<unk>"))
    models = tokenizers(tmp_path, slm=LETTERS) | {"llm": Tokenizer.load(save(tmp_path / "gap", gap, {}))}
    with pytest.raises(TokenizerMismatch, match="id 2 is 'b' in slm and unused in llm"):
        require_same_vocabulary(models)
