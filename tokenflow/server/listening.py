"""Where a server listens: at an address, or at a Unix socket."""

from __future__ import annotations

import shlex
import socket
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from tokenflow.server.options import Options

_BACKLOG = 2048
_PROBE_S = 1.0
"""What a server gets to take the connection that shows that it is there."""


def listening(chosen: Options) -> AbstractContextManager[tuple[socket.socket, str]]:
    """A listening socket, and what curl calls it.

    :raises OSError: if the address cannot be listened at.
    """
    return _at_path(Path(chosen.uds)) if chosen.uds is not None else _at_port(chosen.host, chosen.port)


@contextmanager
def _at_port(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(sock, (host, port), f"{shown}:{port}", "--port")
        yield sock, f"http://{shown}:{sock.getsockname()[1]}"


@contextmanager
def _at_path(path: Path) -> Iterator[tuple[socket.socket, str]]:
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX) as sock:
        _bind(sock, str(path), str(path), "--uds")
        bound = _identity(path)
        try:
            yield sock, f"--unix-socket {shlex.quote(str(path))} http://localhost"
        finally:
            # The next server may be there already: this one has not listened since it began to end.
            if _identity(path) == bound:
                path.unlink(missing_ok=True)


def _bind(sock: socket.socket, address: str | tuple[str, int], where: str, flag: str) -> None:
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen at {where}: {error.strerror or error}; choose another {flag}") from None


def _remove_stale(path: Path) -> None:
    """Remove a socket that a server which is gone has left; of anything else, binding will complain."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file this is: inode numbers are soon used again, and nothing writes to a socket's file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None
