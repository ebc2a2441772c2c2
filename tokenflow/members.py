"""What the router knows of a recipe's models before their workers load them: files, tokenizers, stop ids."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tokenflow import hub
from tokenflow.delimiters import resolve_texts
from tokenflow.dsl.ir import ModelIR, RecipeIR
from tokenflow.dsl.wording import Path
from tokenflow.errors import InvalidRequest, ModelLoadError
from tokenflow.limits import require_files
from tokenflow.text.bytes import byte_tokenizer
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.text.vocabulary import require_same_vocabulary
from tokenflow.types import EndpointConfig

_DIFF_LINES = 40
_FILES, _FILES_OF_A_MODEL = 24, 12
"""What a router opens, most of it while its workers start."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Members:
    """The models of a recipe as found on disk.

    ``recipe`` is the recipe with local directories as paths and token ids for the texts of its rules.
    ``tokenizer`` reads prompts: the entry's, or one of bytes where all models are simulated.  ``chat`` writes
    conversations.  Ids from ``vocab_limit`` on are shared by no tokenizer and never used.  ``eos_token_ids``
    is the union over the models: any of them may end a response, whichever model wrote it.
    ``fingerprints`` are SHA-256 sums of ``tokenizer.json``, and ``endpoints`` where models run that are
    reached over HTTP.
    """

    recipe: RecipeIR
    tokenizer: Tokenizer
    chat: Tokenizer
    vocab_limit: int
    eos_token_ids: tuple[int, ...]
    fingerprints: Mapping[str, str]
    endpoints: Mapping[str, EndpointConfig]

    def model(self, name: str) -> ModelIR:
        """The model that a request names; :raises InvalidRequest: if requests cannot come to such a one."""
        names = self.recipe.reachable()
        if name not in names:
            raise InvalidRequest(
                f"recipe {self.recipe.name!r} has no model {name!r}; it has: {', '.join(names)}", "member"
            )
        return self.recipe.model(name)

    def scorer(self, name: str | None) -> ModelIR:
        """The model that scores prompts: that of this name, else the recipe's ``scorer``, or its only model.

        :raises InvalidRequest: if there is none, or none that could.
        """
        names = self.recipe.reachable()
        chosen = name or self.recipe.scorer or (names[0] if len(names) == 1 else "")
        if not chosen:
            raise InvalidRequest(
                f"recipe {self.recipe.name!r} does not say which model scores prompts; "
                f'add "scorer: <model>" to it (models: {", ".join(names)})',
                "logprobs",
            )
        if chosen in self.recipe.simulated:
            raise InvalidRequest(
                f"model {chosen!r} is simulated, so it has nothing to score with", "logprobs"
            )
        return self.model(chosen)


def load_members(recipe: RecipeIR) -> Members:
    """Find every reachable model with its router heads (fetching what is on the hub), and read its tokenizer;
    simulated ones have neither.

    :raises TokenflowError: if this process may not open as many files as it will need.
    :raises ModelNotFound: if a path or hub id cannot be had.
    :raises ModelLoadError: if a tokenizer cannot be read.
    :raises TokenizerMismatch: if two models do not share one vocabulary.
    :raises RecipeError: if a rule waits for a text that the vocabulary cannot write.
    """
    require_files(_FILES + _FILES_OF_A_MODEL * len(recipe.reachable()))
    names = [name for name in recipe.reachable() if name not in recipe.simulated]
    configs = {name: recipe.model(name).config for name in names}
    endpoints = {name: config.endpoint for name, config in configs.items() if config.endpoint is not None}
    paths, tokenizers = {}, {}
    for name, config in configs.items():
        with _asked_for(recipe, "models", name, "path"):
            paths[name] = hub.resolve(config.path, weights=name not in endpoints)
            tokenizers[name] = Tokenizer.load(paths[name])
    tokenizers = tokenizers or {"": byte_tokenizer()}
    with _asked_for(recipe, "models"):
        vocab_limit = require_same_vocabulary(tokenizers)
    # The vocabulary is one; a simulated entry has no tokenizer of its own, and any member's will do.
    tokenizer = tokenizers.get(recipe.entry) or next(iter(tokenizers.values()))
    if not recipe.chat_template:
        _compare_templates(recipe.entry, tokenizers)
    eos = {token for tokenizer in tokenizers.values() for token in tokenizer.eos_ids}
    models = tuple(
        replace(model, config=replace(model.config, path=str(paths[model.name])))
        if model.name in paths
        else model
        for model in recipe.models
    )
    heads = {name: head for name, head in recipe.heads.items() if head.model in paths}
    for name, head in heads.items():
        if head.path:
            with _asked_for(recipe, "heads", name, "path"):
                heads[name] = replace(head, path=str(hub.resolve_head(head.path)))
    return Members(
        recipe=resolve_texts(replace(recipe, models=models, heads=heads), tokenizer),
        tokenizer=tokenizer,
        chat=tokenizers.get(recipe.chat_template) or tokenizer,
        vocab_limit=vocab_limit,
        eos_token_ids=tuple(sorted(token for token in eos if token < vocab_limit)),
        fingerprints={name: tokenizers[name].fingerprint for name in names},
        endpoints=endpoints,
    )


@contextmanager
def _asked_for(recipe: RecipeIR, *path: str) -> Iterator[None]:
    """Errors in here say where in the recipe it is that cannot be had."""
    where: Path = path
    try:
        yield
    except ModelLoadError as error:
        raise recipe.notes.locate(where, error) from error


def _compare_templates(owner: str, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Warn where the models of a recipe were trained on different conversations."""
    sources = {name: tokenizer.chat_template.sources.get("default") for name, tokenizer in tokenizers.items()}
    own = sources.get(owner)
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
