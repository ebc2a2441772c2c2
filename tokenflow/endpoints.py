"""Where endpoints are, and how long calls may take: what an engine keeps to, and recipes are checked for."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

PAUSE_S = 0.25
"""Before a call is made again for the first time."""
LONGEST_SHARE = 0.9
"""Of a step's time limit: what its calls may take in all."""

_WRITTEN = "[!-~]+"
"""Of a host and a path: printable ASCII without spaces, as they go into the head of a request."""


def parse_url(base_url: str) -> SplitResult:
    """The parts of an endpoint's base URL; :raises ValueError: with what is wrong with it."""
    if "@" in base_url.partition("://")[2].partition("/")[0]:  # which is not shown, whatever else is wrong
        raise ValueError("holds a name or a password; a key comes from the environment, by api_key_env")
    try:
        url = urlsplit(base_url)
        host = (url.hostname or "").encode("idna").decode()
        there = url.scheme in ("http", "https") and host and url.port != 0
    except ValueError:
        there = False
    if not there or not re.fullmatch(_WRITTEN, host + url.path):
        raise ValueError(f"must be like http://127.0.0.1:8000/v1, got {base_url!r}")
    if url.query or url.fragment:
        raise ValueError(f"must end with its path, as in http://127.0.0.1:8000/v1, got {base_url!r}")
    return url


def has_time(elapsed_s: float, timeout_s: float, step_timeout: float) -> bool:
    """Whether a step, so many seconds after its begin, has time for a call that takes as long as it may."""
    return elapsed_s + timeout_s <= LONGEST_SHARE * step_timeout


def can_try_again(timeout_s: float, step_timeout: float) -> bool:
    """Whether a step has time for a second call after one that took as long as it may, in seconds."""
    return has_time(timeout_s + PAUSE_S, timeout_s, step_timeout)
