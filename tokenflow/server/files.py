"""The files that a server may open: each connection takes one, and workers must start whatever clients do."""

from __future__ import annotations

import logging

from tokenflow.limits import raise_file_limit

_OWN = 32
_OF_MODEL = 8
"""More than the three that a running worker takes: the one that replaces it needs some more for a moment."""
_FEWEST = 8

log = logging.getLogger("tokenflow.server")


class Connections:
    """How many connections may be open at once.

    :param most: that many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._warned = False

    @classmethod
    def beside(cls, models: int) -> Connections:
        """As many as leave enough files for the workers of so many models.

        :raises OSError: if hardly any do.
        """
        files, kept = raise_file_limit(), _OWN + _OF_MODEL * models
        if files < kept + _FEWEST:
            raise OSError(
                f"this process may have {files} files open, which is too few for {models} models and their "
                f"clients; allow it {kept + _FEWEST} or more (ulimit -n)"
            )
        return cls(files - kept)

    def fit(self, count: int) -> bool:
        """Whether so many may be open; who has one too many is told nothing, the log is."""
        if count <= self._most:
            self._warned = self._warned and count > self._most // 2
            return True
        if not self._warned:
            log.warning("%d connections are open; more are closed at once (see ulimit -n)", self._most)
            self._warned = True
        return False
