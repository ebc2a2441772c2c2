"""Products with fixed matrices: packed for the CPU's matrix kernels where that pays, plain elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST = {torch.float32: 2**18, torch.bfloat16: 2**14, torch.float16: 2**14}
"""Elements from which a packed matrix is faster; below, the call costs more than the product (12 us each)."""

_ROWS = 8
"""The layout is chosen for products with about as many rows: it serves one row and prefills as well."""


class Linear:
    """``x @ weight.T + bias`` for one matrix, [out, in].

    On a CPU the matrix is kept in the blocked layout of oneDNN instead of its own, which its kernels read
    without packing it anew for every product: 1.3 to 2.5 times as fast for 1 to 32 rows (``bench/step.py``).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = packs(weight)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
            self._product = torch.ops.mkldnn._linear_pointwise.default
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] to [n, out]."""
        if self._packed:
            y: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


def packs(weight: Tensor) -> bool:
    """Whether a matrix is kept packed: a large one, on a CPU for whose type oneDNN has kernels."""
    if weight.device.type != "cpu" or weight.numel() < _LEAST[weight.dtype]:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
