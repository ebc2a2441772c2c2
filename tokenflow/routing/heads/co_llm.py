"""The deferral token of Co-LLM (arXiv 2403.03870): a model that itself says when another should write.

The head is one more row of the model's LM head, so its score is already among the logits of every step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from tokenflow.errors import ModelLoadError, ModelNotFound
from tokenflow.routing.heads.base import Comparison
from tokenflow.routing.heads.checkpoint import stored_threshold

DEFER_TOKEN = "<|defer|>"


@dataclass(frozen=True, slots=True)
class CoLLMHead:
    """Probability of deferring: the sigmoid of the defer token's raw logit (arXiv 2403.03870, section 2)."""

    defer_id: int
    threshold: float | None

    comparison: ClassVar[Comparison] = ">"

    @property
    def excluded(self) -> tuple[int, ...]:
        return (self.defer_id,)

    def score(self, hidden: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        return logits[:, self.defer_id].float().sigmoid()


def load_co_llm(path: Path, *, vocab_size: int) -> CoLLMHead:
    """Find the deferral row of the model in the directory ``path``.

    Its id is ``defer_token_id`` of the config; else that of ``<|defer|>`` in the tokenizer, which must be the
    last row; else the last row of a checkpoint that has one more than the tokenizer has ids.  The threshold
    is ``defer_threshold`` of the config.

    :param vocab_size: width of the engine's logits, which may be padded beyond the checkpoint's rows.
    :raises ModelLoadError: if the files cannot be read, or name a row that the model does not have.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelNotFound(f"{file}: not found; the head of Co-LLM is part of its model's own directory")
    config = _read_json(file)
    rows = _id(config.get("vocab_size"), f"{file}: vocab_size")
    if rows > vocab_size:
        raise ModelLoadError(f"{file}: vocab_size is {rows}, but the loaded model has only {vocab_size} rows")
    defer_id = find_defer_id(path)
    if defer_id is None:
        defer_id = rows - 1
        if (known := _known_ids(path / "tokenizer.json")) != defer_id:
            raise ModelLoadError(
                f"{path}: no deferral row: config.json has no defer_token_id, the tokenizer no "
                f"{DEFER_TOKEN}, the model's {rows} rows are not one more than the tokenizer's {known} ids; "
                "name the trained row as defer_token_id in config.json"
            )
    if config.get("defer_token_id") is None and defer_id != rows - 1:
        raise ModelLoadError(
            f"{path}: {DEFER_TOKEN} is {defer_id} in the tokenizer, but the model's last row is {rows - 1}; "
            "set defer_token_id in config.json to the row that was trained"
        )
    if defer_id >= rows:
        raise ModelLoadError(f"{file}: defer_token_id is {defer_id}, but the model has {rows} rows")
    return CoLLMHead(defer_id, stored_threshold(config.get("defer_threshold"), f"{file}: defer_threshold"))


def find_defer_id(path: Path) -> int | None:
    """The id that the model in the directory ``path`` calls its deferral token, ``None`` if it has none.

    Whatever the recipe, that id is no text: it is never sampled and has no probability.

    :raises ModelLoadError: if the config or the tokenizer cannot be read.
    """
    config, tokenizer = path / "config.json", path / "tokenizer.json"
    named = _read_json(config).get("defer_token_id") if config.is_file() else None
    if named is not None:
        return _id(named, f"{config}: defer_token_id")
    added = _read_json(tokenizer).get("added_tokens", []) if tokenizer.is_file() else []
    try:
        ids = [token["id"] for token in added if token["content"] == DEFER_TOKEN]
    except (KeyError, TypeError) as error:
        raise ModelLoadError(f"{tokenizer}: added_tokens cannot be read: {error!r}") from error
    return _id(ids[0], f"{tokenizer}: the id of {DEFER_TOKEN}") if ids else None


def _known_ids(file: Path) -> int:
    """How many ids a tokenizer has, from 0 to its last one."""
    tokenizer = _read_json(file)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = (token["id"] for token in tokenizer.get("added_tokens", []))
        return 1 + max((*ids, *added), default=-1)
    except (KeyError, TypeError) as error:
        raise ModelLoadError(f"{file}: its vocabulary cannot be read: {error!r}") from error


def _id(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelLoadError(f"{where} must be a whole number of at least 0, got {value!r}")
    return value


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object, got {type(raw).__name__}")
    return raw
