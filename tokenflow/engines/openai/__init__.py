"""Models behind an OpenAI-compatible endpoint, one token or span per call."""

from __future__ import annotations

from tokenflow.engines.openai.engine import OpenAIEngine

__all__ = ["OpenAIEngine"]
