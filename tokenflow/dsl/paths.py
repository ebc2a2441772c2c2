"""Model paths of recipes: a local directory made absolute, or a hub id left alone."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from pathlib import Path

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_path(text: str, folders: Sequence[Path]) -> str | None:
    """What a model path of a recipe means; None if it can be neither a directory nor a hub id.

    Text that begins with ``.``, ``/`` or ``~`` is local, relative to the first of ``folders``; so is text
    that names a directory in one of them.  Anything else is a hub id, ``owner/name`` or ``name``.
    """
    if text.startswith((".", "/", "~")):
        try:
            return os.path.normpath(folders[0] / Path(text).expanduser())
        except RuntimeError:  # the home directory of a user who does not exist
            return None
    for folder in folders:
        if _is_directory(folder / text):
            return os.path.normpath(folder / text)
    return text if _HUB_ID.fullmatch(text) else None


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long for the file system, say
        return False
