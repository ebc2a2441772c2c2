"""How recipe errors speak: values shown short, suggestions, key paths."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping

Path = tuple[str | int, ...]
"""Where a value stands inside a recipe: keys and list indices from the top."""

_SHOWN = 40


def show(value: object) -> str:
    """``value`` as an error message shows it: text in quotes and cut short, containers by their kind."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        short = value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "..."
        return printable(json.dumps(short, ensure_ascii=False))
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int | float):
        text = repr(value)
        return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return f"a {type(value).__name__}"


def printable(text: str) -> str:
    """``text`` on one line, with control characters escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option that ``word`` is most likely a misspelling of."""
    matcher = difflib.SequenceMatcher(b=word.lower())
    best, best_rank = None, (0.6, True)
    for option in options:
        matcher.set_seq1(option.lower())
        rank = (matcher.ratio(), option[:1].lower() == word[:1].lower())
        if rank > best_rank:
            best, best_rank = option, rank
    return best


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A suggestion to append to a message, or nothing."""
    option = closest(word, options)
    return f' (did you mean "{option}"?)' if option is not None else ""


def unknown_model(name: str, models: Iterable[str]) -> str:
    """What to say of a model that a recipe does not have."""
    known = list(models)
    hint = did_you_mean(name, known) or f" (models: {', '.join(known) or 'none'})"
    return f"unknown model {show(name)}{hint}"


def key_path(path: Path) -> str:
    """``routes.slm[0].when``; keys that are not plain words stand in quotes."""
    parts: list[str] = []
    for key in path:
        if isinstance(key, int):
            parts.append(f"[{key}]")
        else:
            word = key if re.fullmatch(r"[\w-]+", key) else show(key)
            parts.append(f".{word}" if parts else word)
    return "".join(parts)
