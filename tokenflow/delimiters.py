"""Texts in rules as token ids: what ``at("\\n\\n")`` and ``follows("\\n\\n")`` look for in an output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenflow.dsl.ir import Expr, RecipeIR
from tokenflow.dsl.tree import rewrite, walk
from tokenflow.dsl.wording import Path, show
from tokenflow.errors import RecipeError
from tokenflow.text.tokenizer import Tokenizer

Sequences = tuple[tuple[int, ...], ...]
"""Token id sequences, any of which will do."""


def resolve_texts(recipe: RecipeIR, tokenizer: Tokenizer) -> RecipeIR:
    """The recipe with token ids in place of the texts of its rules.

    ``at`` gets every id whose text contains the text, ``follows`` every id whose text ends in it; both get
    the ids that spell it, where it takes several.  Special tokens have no text, so they count only where a
    rule names one as it is written.

    :param tokenizer: of the entry model; the vocabulary is the same for all.
    :raises RecipeError: with every rule that has a text that no ids spell.
    """
    trees: dict[Path, Expr] = {
        **{
            ("routes", model, index): rule.when
            for model, rules in recipe.routes.items()
            for index, rule in enumerate(rules)
        },
        **{
            ("models", model, "signals", name): tree
            for model, python in recipe.python.items()
            for name, tree in python.signals.items()
        },
        **({} if recipe.rollback_to is None else {("rollback_to",): recipe.rollback_to}),
    }
    texts = {
        node
        for tree in trees.values()
        for node in walk(tree)
        if node[0] in ("at", "follows") and isinstance(node[1], str)
    }
    if not texts:
        return recipe
    pieces = _pieces(tokenizer)
    found = {node: _sequences(str(node[0]), str(node[1]), tokenizer, pieces) for node in texts}
    problems = []
    for path, tree in trees.items():
        lost = (node[1] for node in walk(tree) if node in found and not found[node])
        for text in dict.fromkeys(lost):
            message = f"no token ids spell {show(text)}: the output can never reach it"
            problems.append(recipe.notes.problem(path, message))
    if problems:
        raise RecipeError(problems)
    resolved: dict[Expr, Expr] = {node: (node[0], sequences) for node, sequences in found.items()}

    def with_ids(tree: Expr) -> Expr:
        return rewrite(tree, lambda leaf: resolved.get(leaf, leaf))

    routes = {
        model: tuple(replace(rule, when=with_ids(rule.when)) for rule in rules)
        for model, rules in recipe.routes.items()
    }
    python = {
        model: replace(own, signals={name: with_ids(tree) for name, tree in own.signals.items()})
        for model, own in recipe.python.items()
    }
    rollback_to = None if recipe.rollback_to is None else with_ids(recipe.rollback_to)
    return replace(recipe, routes=routes, python=python, rollback_to=rollback_to)


def _pieces(tokenizer: Tokenizer) -> dict[int, bytes]:
    """What each id adds to a text that it does not begin; ids without a text are left out."""
    ids = (i for i, token in enumerate(tokenizer.tokens) if token is not None)
    return {i: tokenizer.piece(i) for i in ids if i not in tokenizer.special_ids}


def _sequences(node: str, text: str, tokenizer: Tokenizer, pieces: Mapping[int, bytes]) -> Sequences:
    """The sequences for a text; none if no ids spell it."""
    wanted = text.encode()
    named = {i for i in tokenizer.special_ids if tokenizer.tokens[i] == text}
    fits = bytes.__contains__ if node == "at" else bytes.endswith
    singles = sorted(named | {i for i, piece in pieces.items() if fits(piece, wanted)})
    spelled = _spelled(text, tokenizer)
    if not singles and not spelled:
        return ()
    return (*((i,) for i in singles), *([spelled] if len(spelled) > 1 else []))


def _spelled(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The fewest last ids of the encoded text that end in it: some tokenizers put a space before a text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for start in reversed(range(len(ids))):
        if b"".join(map(tokenizer.piece, ids[start:])).endswith(text.encode()):
            return tuple(ids[start:])
    return ()
