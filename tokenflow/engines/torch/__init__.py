"""The embedded engine: a lean forward pass of dense decoder models in plain torch, on a CPU or one GPU."""

from __future__ import annotations

from tokenflow.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
