"""What the router knows of a recipe's models before their workers load them: files, tokenizers, stop ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenflow import hub
from tokenflow.delimiters import resolve_texts
from tokenflow.dsl.ir import RecipeIR
from tokenflow.text.bytes import byte_tokenizer
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.text.vocabulary import require_same_vocabulary
from tokenflow.types import EndpointConfig


@dataclass(frozen=True, slots=True)
class Members:
    """The models of a recipe as found on disk.

    ``recipe`` is the recipe with local directories as paths and token ids for the texts of its rules.
    ``tokenizer`` reads prompts: the entry's, or one of bytes where all models are simulated.  Ids from
    ``vocab_limit`` on are shared by no tokenizer and never used.  ``eos_token_ids`` is the union over the
    models: any of them may end a response, whichever model wrote it.  ``fingerprints`` are SHA-256 sums
    of ``tokenizer.json``, and ``endpoints`` where models run that are reached over HTTP.
    """

    recipe: RecipeIR
    tokenizer: Tokenizer
    vocab_limit: int
    eos_token_ids: tuple[int, ...]
    fingerprints: Mapping[str, str]
    endpoints: Mapping[str, EndpointConfig]


def load_members(recipe: RecipeIR) -> Members:
    """Find every reachable model with its router heads (fetching what is on the hub), and read its tokenizer;
    simulated ones have neither.

    :raises ModelNotFound: if a path or hub id cannot be had.
    :raises ModelLoadError: if a tokenizer cannot be read.
    :raises TokenizerMismatch: if two models do not share one vocabulary.
    :raises RecipeError: if a rule waits for a text that the vocabulary cannot write.
    """
    names = [name for name in recipe.reachable() if name not in recipe.simulated]
    configs = {name: recipe.model(name).config for name in names}
    endpoints = {name: config.endpoint for name, config in configs.items() if config.endpoint is not None}
    paths = {
        name: hub.resolve(config.path, weights=name not in endpoints) for name, config in configs.items()
    }
    tokenizers = {name: Tokenizer.load(path) for name, path in paths.items()} or {"": byte_tokenizer()}
    vocab_limit = require_same_vocabulary(tokenizers)
    # The vocabulary is one; a simulated entry has no tokenizer of its own, and any member's will do.
    tokenizer = tokenizers.get(recipe.entry) or next(iter(tokenizers.values()))
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
        recipe=resolve_texts(replace(recipe, models=models, heads=heads), tokenizer),
        tokenizer=tokenizer,
        vocab_limit=vocab_limit,
        eos_token_ids=tuple(sorted(token for token in eos if token < vocab_limit)),
        fingerprints={name: tokenizers[name].fingerprint for name in names},
        endpoints=endpoints,
    )
