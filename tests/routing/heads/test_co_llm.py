"""Co-LLM's deferral row: where it is found, what it scores, and that it is no word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.tiny import VOCAB, edit_config, make_model, reference_model, some_tokens
from tokenflow.engines.base import Extend
from tokenflow.engines.torch import TorchEngine
from tokenflow.errors import ModelLoadError, ModelNotFound
from tokenflow.routing.heads import CoLLMHead, find_defer_id, load_head
from tokenflow.routing.signals import Signals
from tokenflow.types import ModelConfig

ROWS = 40


def model_files(path: Path, defer_in_tokenizer: int | None = None, **config: Any) -> Path:
    """The files of a model directory that say where the deferral row is."""
    (path / "config.json").write_text(json.dumps({"vocab_size": ROWS} | config))
    if defer_in_tokenizer is not None:
        added = [{"id": 3, "content": "<pad>"}, {"id": defer_in_tokenizer, "content": "<|defer|>"}]
        (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return path


def load(path: Path, rows: int = ROWS) -> CoLLMHead:
    head = load_head("co_llm", path, embeddings=torch.empty(rows, 8), hidden_size=8, device="cpu")
    assert isinstance(head, CoLLMHead)
    return head


@pytest.mark.parametrize("tied", [False, True])
def test_the_score_is_the_sigmoid_of_the_hidden_state_times_the_row(tmp_path: Path, tied: bool) -> None:
    path = make_model(tmp_path / "model", vocab_size=VOCAB + 1, tie_word_embeddings=tied)
    edit_config(path, defer_token_id=VOCAB, defer_threshold=0.15)
    engine = TorchEngine(ModelConfig(path=str(path), dtype="float32", device="cpu"))
    tokens = some_tokens(9)
    output = engine.step([Extend(engine.open(tokens).slot, tokens, "all")])
    head = load(path, engine.info.vocab_size)
    scores = head.score(output.hidden, output.logits.argmax(-1), output.logits)
    model = reference_model(path)
    embedded, read_out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert torch.equal(embedded, read_out) == tied
    with torch.no_grad():
        expected = (output.hidden @ read_out[VOCAB]).sigmoid()
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)
    assert expected.std() > 0.01
    assert head.threshold == 0.15


def test_the_score_is_float32_of_logits_in_any_type(tmp_path: Path) -> None:
    head = load(model_files(tmp_path, defer_token_id=5))
    logits = torch.randn(3, ROWS).bfloat16()
    scores = head.score(torch.empty(3, 8), torch.zeros(3, dtype=torch.int64), logits)
    assert torch.equal(scores, logits[:, 5].float().sigmoid())


def test_the_config_goes_before_the_tokenizer(tmp_path: Path) -> None:
    assert load(model_files(tmp_path, defer_in_tokenizer=7, defer_token_id=5)).defer_id == 5


def test_the_tokenizer_is_asked_where_the_config_says_nothing(tmp_path: Path) -> None:
    path = model_files(tmp_path, defer_in_tokenizer=ROWS - 1, defer_token_id=None)
    assert load(path).defer_id == ROWS - 1
    assert load(path, rows=64).defer_id == ROWS - 1


def tokenizer_of(path: Path, ids: int, added: int = 1) -> Path:
    """A tokenizer of so many ids, the last ones of them added, in the model's directory."""
    vocab = {f"t{i}": i for i in range(ids - added)}
    tokens = [{"id": i, "content": f"<{i}>"} for i in range(ids - added, ids)]
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": tokens}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.mark.parametrize("added", [0, 1, ROWS - 1])
def test_the_one_row_that_the_tokenizer_has_no_id_for_is_taken_where_nobody_says(
    tmp_path: Path, added: int
) -> None:
    path = tokenizer_of(model_files(tmp_path), ROWS - 1, added)
    # An engine that pads its vocabulary has more columns than the checkpoint has rows.
    assert load(path, rows=64).defer_id == ROWS - 1


@pytest.mark.parametrize("ids", [ROWS, ROWS - 2, ROWS + 1])
def test_a_model_without_a_deferral_row_is_refused_and_told_what_is_missing(tmp_path: Path, ids: int) -> None:
    """Its rows are those of the tokenizer, or padded beyond them: the last one was never trained to defer."""
    with pytest.raises(ModelLoadError) as caught:
        load(tokenizer_of(model_files(tmp_path), ids))
    assert str(caught.value) == (
        f"{tmp_path}: no deferral row: config.json has no defer_token_id, the tokenizer no <|defer|>, the "
        f"model's {ROWS} rows are not one more than the tokenizer's {ids} ids; name the trained row as "
        "defer_token_id in config.json"
    )


def test_a_model_without_a_stored_threshold_has_none(tmp_path: Path) -> None:
    assert load(model_files(tmp_path, defer_token_id=5)).threshold is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"defer_in_tokenizer": 7}, r"<\|defer\|> is 7 in the tokenizer, but the model's last row is 39"),
        ({"defer_in_tokenizer": ROWS}, r"<\|defer\|> is 40 in the tokenizer, but the model's last row is 39"),
        ({"defer_token_id": ROWS}, r"defer_token_id is 40, but the model has 40 rows"),
        ({"defer_token_id": -1}, r"defer_token_id must be a whole number of at least 0, got -1"),
        ({"defer_token_id": "39"}, r"defer_token_id must be a whole number of at least 0, got '39'"),
        ({"defer_token_id": True}, r"defer_token_id must be a whole number of at least 0, got True"),
        ({"defer_token_id": 5, "vocab_size": None}, r"vocab_size must be a whole number"),
        ({"defer_token_id": 5, "vocab_size": 41}, r"vocab_size is 41, but the loaded model has only 40"),
        ({"defer_token_id": 5, "defer_threshold": "x"}, r"defer_threshold must be a finite number, got 'x'"),
    ],
)
def test_a_row_that_the_model_does_not_have_is_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(model_files(tmp_path, **files))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", r"config\.json: cannot be read"),
        ("config.json", "[]", r"config\.json: must hold a JSON object, got list"),
        ("tokenizer.json", "\0", r"tokenizer\.json: cannot be read"),
        ("tokenizer.json", '{"added_tokens": [1]}', r"tokenizer\.json: added_tokens cannot be read"),
        (
            "tokenizer.json",
            '{"added_tokens": [{"content": "<|defer|>", "id": "9"}]}',
            r"tokenizer\.json: the id of <\|defer\|> must be a whole number",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (model_files(tmp_path) / name).write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_the_head_needs_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json: not found"):
        load(tmp_path / "nowhere")


def test_a_model_without_a_deferral_token_has_no_id_for_it(tmp_path: Path) -> None:
    assert find_defer_id(tmp_path) is None
    assert find_defer_id(model_files(tmp_path)) is None
    assert find_defer_id(model_files(tmp_path, defer_in_tokenizer=7)) == 7
    assert find_defer_id(model_files(tmp_path, defer_in_tokenizer=7, defer_token_id=9)) == 9


def test_the_deferral_row_takes_no_part_in_any_distribution(tmp_path: Path) -> None:
    head = load(model_files(tmp_path, defer_token_id=5))
    logits = torch.randn(4, ROWS)
    logits[:, 5] = 30.0
    tokens = torch.zeros(4, dtype=torch.int64)
    signals = Signals(logits, tokens, excluded=torch.tensor(head.excluded))
    words = torch.cat((logits[:, :5], logits[:, 6:]), -1).softmax(-1)
    assert (signals.probs()[:, 5] == 0).all()
    torch.testing.assert_close(signals.confidence(), words.amax(-1))
    assert (head.score(torch.empty(4, 8), tokens, logits) > 0.99).all()
