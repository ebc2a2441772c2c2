"""Batch thresholds that can be met: the liveness rule of delayed batching."""

from __future__ import annotations

from collections.abc import Mapping


def feasible(thresholds: Mapping[str, int], active: int) -> dict[str, int]:
    """Lower thresholds, the largest first, until ``active`` requests cannot all wait below them.

    The rule is sum(B_i - 1) < N (TokenRouter, arXiv 2610.12242, section 4).  With it, when every active
    request waits in some mailbox and no model runs, at least one mailbox has reached its threshold: there
    is no deadlock to detect.
    """
    lowered = dict(thresholds)
    excess = sum(lowered.values()) - len(lowered) - max(active - 1, 0)
    while excess > 0:
        largest = max(lowered, key=lambda name: lowered[name])
        lowered[largest] -= 1
        excess -= 1
    return lowered
