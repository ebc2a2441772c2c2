"""Products with fixed matrices: packed for the CPU's matrix kernels where that pays, plain elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST = {torch.float32: 2**18, torch.bfloat16: 2**14, torch.float16: 2**14}
"""Elements from which a packed matrix is faster; below, the call costs more than the product (12 us each)."""

_PIECES = (256, 128, 64, 32)
"""Rows of a product are cut into these, and the rest that is below.

oneDNN makes a kernel for every number of rows and keeps 1,024 of them, each with working memory of about the
size of its result: with prefills of all lengths that would grow to many times the weights.
"""

_ROWS = 8
"""The layout is chosen for products with about as many rows: it serves one row and prefills as well."""


class Linear:
    """``x @ weight.T + bias`` for one matrix, [out, in].

    On a CPU the matrix is kept in the blocked layout of oneDNN instead of its own, which its kernels read
    without packing it anew for every product: 1.3 to 2.5 times as fast for 1 to 32 rows (``bench/step.py``).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = packs(weight.numel(), weight.dtype, weight.device)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
            self._product = torch.ops.mkldnn._linear_pointwise.default
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] to [n, out]."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        if len(x) <= _PIECES[-1]:
            return self._multiply(x)
        cut: tuple[Tensor, ...] = x.split(pieces(len(x)))  # type: ignore[no-untyped-call]
        return torch.cat([self._multiply(piece) for piece in cut])

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y


def pieces(rows: int) -> list[int]:
    """Into which numbers of rows so many are cut."""
    cut = [_PIECES[0]] * (rows // _PIECES[0])
    rest = rows % _PIECES[0]
    for size in (*_PIECES[1:], rest % _PIECES[-1]):
        if 0 < size <= rest:
            cut.append(size)
            rest -= size
    return cut


def packs(elements: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a matrix is kept packed: a large one, on a CPU for whose type oneDNN has kernels."""
    if device.type != "cpu" or elements < _LEAST[dtype]:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
