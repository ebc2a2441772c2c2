"""Models on SGLang's kernels and tensor parallelism, scheduled by tokenflow."""

from __future__ import annotations

from tokenflow.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]
