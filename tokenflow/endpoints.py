"""How long calls to endpoints may take: what an engine keeps to, and recipes are checked for."""

from __future__ import annotations

PAUSE_S = 0.25
"""Before a call is made again for the first time."""
LONGEST_SHARE = 0.9
"""Of a step's time limit: what its calls may take in all."""


def has_time(elapsed_s: float, timeout_s: float, step_timeout: float) -> bool:
    """Whether a step, so many seconds after its begin, has time for a call that takes as long as it may."""
    return elapsed_s + timeout_s <= LONGEST_SHARE * step_timeout


def can_try_again(timeout_s: float, step_timeout: float) -> bool:
    """Whether a step has time for a second call after one that took as long as it may, in seconds."""
    return has_time(timeout_s + PAUSE_S, timeout_s, step_timeout)
