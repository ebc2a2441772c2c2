"""Memory for rows of keys and values: address space for all that a row may hold, pages for what it holds."""

from __future__ import annotations

import mmap
import platform
from collections.abc import Iterator
from contextlib import suppress
from math import gcd

import torch

from tokenflow.engines.torch.config import ModelSpec
from tokenflow.errors import ModelLoadError

# Python knows the flag by name from 3.13 on; this is its value where Linux runs torch.
_LINUX = platform.system() == "Linux" and platform.machine() in {"x86_64", "aarch64"}
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _LINUX else 0)


class Arena:
    """Zeros, [layers, rows, 2 * kv_heads, length, head_dim]; keys come before values.

    On a CPU, memory comes with the first write to a page and goes back to the system with :meth:`clear`.

    :param length: tokens of a row; rounded up so that every head starts on a page of its own.
    :raises ModelLoadError: if the address space cannot be had.
    """

    def __init__(
        self, spec: ModelSpec, rows: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._token_bytes = spec.head_dim * dtype.itemsize
        per_page = mmap.PAGESIZE // gcd(mmap.PAGESIZE, self._token_bytes)
        length = -(-length // per_page) * per_page
        shape = (spec.layers, rows, 2 * spec.kv_heads, length, spec.head_dim)
        self._memory: mmap.mmap | None = None
        if device.type == "cpu" and hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MADV_DONTNEED"):
            self._memory = _reserve(torch.Size(shape).numel() * dtype.itemsize)
            self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` tokens of a row to another."""
        self.tensor[:, target, :, :count] = self.tensor[:, source, :, :count]

    def clear(self, row: int, start: int, stop: int) -> None:
        """Make tokens ``start`` to ``stop`` of a row zero, and give whole pages back.

        What follows ``stop`` must be zero already.
        """
        self.tensor[:, row, :, start:stop] = 0
        if self._memory is not None:
            for first, size in self._whole_pages(row, start, stop):
                self._memory.madvise(mmap.MADV_DONTNEED, first, size)

    def _whole_pages(self, row: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of the pages that hold nothing before ``start``, per layer and head."""
        page = mmap.PAGESIZE
        first = -(-start * self._token_bytes // page) * page
        size = -(-stop * self._token_bytes // page) * page - first
        if size <= 0:
            return
        layers, _, heads, _, _ = self.tensor.shape
        layer_bytes, row_bytes, head_bytes, _, _ = (n * self.tensor.itemsize for n in self.tensor.stride())
        for layer in range(layers):
            for head in range(heads):
                yield layer * layer_bytes + row * row_bytes + head * head_bytes + first, size


def _reserve(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        raise ModelLoadError(
            f"cannot reserve {size / 2**30:.1f} GiB of address space for the KV cache ({error}); "
            "lower kv_cache, context_length or max_requests"
        ) from error
    # A huge page would back many rows at once, and each row's first token would touch one per head.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
