"""Stands in for SGLang's kernels, which are built for CUDA only: every name is there, every call fails.

On a CPU without AMX, SGLang imports names from here and calls none of them for a dense model.
"""

from __future__ import annotations

from typing import NoReturn


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called on a CPU")

    return missing
