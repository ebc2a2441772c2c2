"""What the router knows of a recipe's models before their workers load them: files, tokenizers, stop ids."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenflow import hub
from tokenflow.delimiters import resolve_texts
from tokenflow.dsl.ir import RecipeIR
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.text.vocabulary import require_same_vocabulary

_DIFF_LINES = 40

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Members:
    """The models of a recipe as found on disk.

    ``recipe`` is the recipe with local directories as paths and token ids for the texts of its rules.  Ids
    from ``vocab_limit`` on are shared by no tokenizer and never used.  ``eos_token_ids`` is the union over
    the models: any of them may end a response, whichever model wrote it.  ``fingerprints`` are SHA-256 sums
    of ``tokenizer.json``.
    """

    recipe: RecipeIR
    tokenizers: Mapping[str, Tokenizer]
    vocab_limit: int
    eos_token_ids: tuple[int, ...]
    fingerprints: Mapping[str, str]

    @property
    def tokenizer(self) -> Tokenizer:
        """What texts are read and written with: the entry model's."""
        return self.tokenizers[self.recipe.entry]

    @property
    def chat(self) -> Tokenizer:
        """What conversations are written with."""
        return self.tokenizers[self.recipe.chat_template or self.recipe.entry]


def load_members(recipe: RecipeIR) -> Members:
    """Find every reachable model with its router heads (fetching what is on the hub), and read its tokenizer.

    :raises ModelNotFound: if a path or hub id cannot be had.
    :raises ModelLoadError: if a tokenizer cannot be read.
    :raises TokenizerMismatch: if two models do not share one vocabulary.
    :raises RecipeError: if a rule waits for a text that the vocabulary cannot write.
    """
    names = recipe.reachable()
    paths = {name: hub.resolve(recipe.model(name).config.path) for name in names}
    tokenizers = {name: Tokenizer.load(path) for name, path in paths.items()}
    vocab_limit = require_same_vocabulary(tokenizers)
    if not recipe.chat_template:
        _compare_templates(recipe.entry, tokenizers)
    eos = {token for tokenizer in tokenizers.values() for token in tokenizer.eos_ids}
    models = tuple(
        replace(model, config=replace(model.config, path=str(paths[model.name])))
        if model.name in paths
        else model
        for model in recipe.models
    )
    heads = {
        name: replace(head, path=str(hub.resolve_head(head.path))) if head.path else head
        for name, head in recipe.heads.items()
        if head.model in paths
    }
    return Members(
        recipe=resolve_texts(replace(recipe, models=models, heads=heads), tokenizers[recipe.entry]),
        tokenizers=tokenizers,
        vocab_limit=vocab_limit,
        eos_token_ids=tuple(sorted(token for token in eos if token < vocab_limit)),
        fingerprints={name: tokenizer.fingerprint for name, tokenizer in tokenizers.items()},
    )


def _compare_templates(owner: str, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Warn where the models of a recipe were trained on different conversations."""
    sources = {name: tokenizer.chat_template.sources.get("default") for name, tokenizer in tokenizers.items()}
    own = sources[owner]
    for name, source in sources.items():
        if own is None or source is None or source == own:
            continue
        lines = difflib.unified_diff(own.splitlines(), source.splitlines(), owner, name, lineterm="", n=1)
        log.warning(
            "the chat template of %s differs from that of %s, which is used; name the one to use with "
            '"chat_template" in the recipe:\n%s',
            name,
            owner,
            "\n".join(list(lines)[:_DIFF_LINES]),
        )
