"""How long calls to endpoints may take: what an engine keeps to, and recipes are checked for."""

from __future__ import annotations

PAUSE_S = 0.25
"""Before a call is made again for the first time."""
LONGEST_SHARE = 0.9
"""Of a step's time limit: what its calls may take in all."""


def can_try_again(timeout_s: float, step_timeout: float) -> bool:
    """Whether a step has time for a second call after one that took as long as it may, in seconds."""
    return 2 * timeout_s + PAUSE_S <= LONGEST_SHARE * step_timeout
