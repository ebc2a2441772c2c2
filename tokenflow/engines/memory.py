"""How much KV cache an engine takes where the recipe does not say."""

from __future__ import annotations

import os

_CPU_SHARE, _CPU_MOST = 8, 4 * 2**30


def cpu_budget() -> int:
    """Bytes of KV cache on a CPU: an eighth of the machine's memory, 4 GiB at most.

    Several models share the machine, and memory is touched only as tokens come.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory // _CPU_SHARE, _CPU_MOST)


def tokens_for(budget: int, token_bytes: int, max_requests: int, context_length: int) -> int:
    """Tokens of KV cache: room for every request at full length, within ``budget`` bytes; at least one."""
    return min(max_requests * context_length, max(budget // token_bytes, 1))
