"""How many files this process may have open: connections to workers and clients count as files."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from tokenflow.errors import TokenflowError


def raise_file_limit(most: int = 65536) -> int:
    """Let the process open as many files as it may, but not more than ``most``; returns how many it may now.

    Where there is no limit, that is ``most``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    if soft < (wanted := most if hard == resource.RLIM_INFINITY else min(hard, most)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def require_files(needed: int) -> None:
    """See that ``needed`` more files can be opened, before something fails half done.

    :raises TokenflowError: if they cannot.
    """
    are = _open_files()
    may = raise_file_limit(are + needed)
    if are + needed > may:
        raise TokenflowError(
            f"this process may have {may} files open (ulimit -n), and has {are}; it needs {needed} more, for "
            "connections to its workers: raise the limit (ulimit -n 1024)"
        )


def _open_files() -> int:
    """How many files are open; as many as may be where not even these can be listed."""
    try:
        return len(list(Path("/dev/fd").iterdir())) - 1  # less the list itself
    except OSError as error:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if error.errno == errno.EMFILE else 0


def said(error: OSError) -> str:
    """What an error says, and what to do if it is about too many open files."""
    many = error.errno in (errno.EMFILE, errno.ENFILE)
    return f"{error}; raise the limit (ulimit -n)" if many else str(error)
