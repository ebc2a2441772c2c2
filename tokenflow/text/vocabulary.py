"""Whether models can exchange token ids."""

from __future__ import annotations

from collections.abc import Mapping

from tokenflow.errors import TokenizerMismatch
from tokenflow.text.tokenizer import Tokenizer


def require_same_vocabulary(tokenizers: Mapping[str, Tokenizer]) -> int:
    """Check that every id means the same token to all models; return how many ids they share.

    Ids that only some models have, beyond the end of the shortest vocabulary (padding, a special token of
    one model's own), are allowed: no id from the returned number on may be sent or sampled.

    :param tokenizers: at least one tokenizer by model name.
    :raises TokenizerMismatch: names two models, the first id that differs and both its tokens.
    """
    limit = min(map(len, tokenizers.values()))
    (first, reference), *others = tokenizers.items()
    shared = reference.tokens[:limit]
    for name, tokenizer in others:
        tokens = tokenizer.tokens[:limit]
        if tokens != shared:
            token_id = next(i for i in range(limit) if tokens[i] != shared[i])
            raise TokenizerMismatch(
                f"models {first} and {name} do not share one vocabulary: id {token_id} is "
                f"{_spell(shared[token_id])} in {first} and {_spell(tokens[token_id])} in {name} "
                f"({len(reference)} and {len(tokenizer)} ids); the models of a recipe exchange token ids, so "
                "choose models with the same tokenizer"
            )
    return limit


def _spell(token: str | None) -> str:
    return "unused" if token is None else repr(token)
