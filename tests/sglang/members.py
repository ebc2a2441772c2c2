"""Recipes of the demo with members on SGLang."""

from __future__ import annotations

ALGORITHM_NAMES = ("r2r", "citer", "co_llm", "me")
"""Beside R-Stitch, whose record is its own."""

TAU = 0.03


def on_sglang(*members: str, **settings: object) -> list[str]:
    """Overrides that run members on SGLang, on the CPU."""
    chosen = {"engine": "sglang", "device": "cpu", "dtype": "float32", "kv_cache": 16384} | settings
    return [f"models.{member}.{key}={value}" for member in members for key, value in chosen.items()]
