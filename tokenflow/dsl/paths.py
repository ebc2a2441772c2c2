"""Paths in recipes: local files and directories made absolute, names on the hub left alone."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from pathlib import Path

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILE = re.compile(r"[\w.-]+(/[\w.+-]+)+")

_NOWHERE = re.compile(r"(?!)")


def model_path(text: str, folders: Sequence[Path]) -> str | None:
    """What a model path of a recipe means; None if it can be neither a directory nor a hub id.

    Text that begins with ``.``, ``/`` or ``~`` is local, relative to the first of ``folders``; so is text
    that names a directory in one of them.  Anything else is a hub id, ``owner/name`` or ``name``.
    """
    return _local(text, folders, Path.is_dir, _HUB_ID)


def head_path(text: str, folders: Sequence[Path]) -> str | None:
    """What the path of a router head means; None if it can be neither local nor on the hub.

    As for models, but local files count as well, and on the hub ``owner/name`` may be followed by a path.
    """
    return _local(text, folders, Path.exists, _HUB_FILE)


def trace_path(text: str, folders: Sequence[Path]) -> str | None:
    """What the path of a recorded trace means, a local file; None if there is none."""
    return _local(text, folders, Path.is_file, _NOWHERE)


def _local(
    text: str, folders: Sequence[Path], found: Callable[[Path], bool], remote: re.Pattern[str]
) -> str | None:
    if text.startswith((".", "/", "~")):
        try:
            return os.path.normpath(folders[0] / Path(text).expanduser())
        except RuntimeError:  # the home directory of a user who does not exist
            return None
    for folder in folders:
        try:
            if found(folder / text):
                return os.path.normpath(folder / text)
        except OSError:  # a name too long for the file system, say
            continue
    return text if remote.fullmatch(text) else None
