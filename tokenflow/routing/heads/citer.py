"""The router of CITER (arXiv 2502.01976): is the small model's token good enough to keep?

The published network is Linear, BatchNorm, ReLU, Linear, Linear, sigmoid.  Its BatchNorm is affine once
trained and nothing stands between the last two Linears, so both are folded at load, in float64: two matrices
remain.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenflow.errors import ModelLoadError
from tokenflow.routing.heads.base import Comparison
from tokenflow.routing.heads.checkpoint import Tensors, read, require_kind

_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class CiterHead:
    """Probability that the sampled token is good, from the hidden state alone (arXiv 2502.01976, section 3).

    :param up: [2H, H], with its bias [2H].
    :param out: [1, 2H], with its bias [1].
    """

    up: Tensor
    up_bias: Tensor
    out: Tensor
    out_bias: Tensor

    threshold: ClassVar[float | None] = None
    comparison: ClassVar[Comparison] = "<"
    excluded: ClassVar[tuple[int, ...]] = ()

    def score(self, hidden: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        inner = F.linear(hidden.to(self.up.dtype), self.up, self.up_bias).relu_()
        return F.linear(inner, self.out, self.out_bias).squeeze(-1).float().sigmoid()


def shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint for hidden size H, with its shape."""
    inner = 2 * hidden
    return {
        "mlp.0.weight": (inner, hidden),
        "mlp.0.bias": (inner,),
        "mlp.1.weight": (inner,),
        "mlp.1.bias": (inner,),
        "mlp.1.running_mean": (inner,),
        "mlp.1.running_var": (inner,),
        "mlp.1.num_batches_tracked": (),
        "mlp.4.weight": (hidden, inner),
        "mlp.4.bias": (hidden,),
        "linear.weight": (1, hidden),
        "linear.bias": (1,),
    }


def load_citer(path: Path, *, hidden_size: int, device: torch.device, dtype: torch.dtype) -> CiterHead:
    """Load a published checkpoint: a ``.pth`` file, or a directory with one.

    :raises ModelLoadError: if it cannot be read, is not of this kind, or was made for another model.
    """
    file = find_file(path)
    saved = read(file)
    require_kind(saved, "citer", file)
    tensors = Tensors(saved, file)
    _, hidden = tensors.matrix("linear.weight")
    tensors.check(shapes(hidden))
    if hidden != hidden_size:
        raise ModelLoadError(
            f"{file}: made for a model with hidden size {hidden} (the columns of linear.weight); "
            f"this model's is {hidden_size}"
        )
    variance = tensors["mlp.1.running_var"]
    if (variance < 0).any():
        raise ModelLoadError(f"{file}: mlp.1.running_var must not be negative")
    scale = tensors["mlp.1.weight"] / (variance + _EPS).sqrt()
    up = tensors["mlp.0.weight"] * scale[:, None]
    up_bias = (tensors["mlp.0.bias"] - tensors["mlp.1.running_mean"]) * scale + tensors["mlp.1.bias"]
    out = tensors["linear.weight"] @ tensors["mlp.4.weight"]
    out_bias = tensors["linear.weight"] @ tensors["mlp.4.bias"] + tensors["linear.bias"]
    return CiterHead(*(tensor.to(device, dtype) for tensor in (up, up_bias, out, out_bias)))


def find_file(path: Path) -> Path:
    """The checkpoint in a directory; :raises ModelLoadError: unless exactly one ``.pth`` file is there."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.pth"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelLoadError(f"{path}: name one .pth file: a CITER checkpoint; found {found}")
    return files[0]
