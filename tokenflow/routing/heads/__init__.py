"""Router heads: small networks that score sampled tokens, loaded from the published checkpoint formats."""

from __future__ import annotations

from tokenflow.routing.heads.base import Comparison, Head
from tokenflow.routing.heads.citer import CiterHead
from tokenflow.routing.heads.co_llm import DEFER_TOKEN, CoLLMHead, find_defer_id
from tokenflow.routing.heads.load import KINDS, load_head
from tokenflow.routing.heads.r2r import R2RHead

__all__ = [
    "DEFER_TOKEN",
    "KINDS",
    "CiterHead",
    "CoLLMHead",
    "Comparison",
    "Head",
    "R2RHead",
    "find_defer_id",
    "load_head",
]
