"""The router of R2R (arXiv 2505.21600): does the sampled token lead away from what the large model writes?

Neither the projections in front nor the affine part of a layer norm has a non-linearity after it, so they are
folded at load, in float64, into the matrix that follows::

    u = concat(h, e, W_l l + b_l)              x = W concat(h, e, l) + b
    x = W_i (W_c u + b_c) + b_i         ->     x = x + MLP(normalised(x))   for every block
    x = x + MLP(layer_norm(x))                 p = sigmoid(w normalised(x) + b)
    p = sigmoid(w layer_norm(x) + b)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenflow.errors import ModelLoadError
from tokenflow.routing.heads.base import Comparison
from tokenflow.routing.heads.checkpoint import Tensors, read, require_kind, stored_threshold

MODEL_TYPE = "HiddenStatesTokenLMHeadLogitsClassifier"
FILE_NAMES = ("default_router.pt", "router.pt", "default_router_sampling.pt")

_PARTS = frozenset({"model_type", "init_args", "common_args", "model_specific_args", "state_dict"})
_INPUTS = frozenset({"hidden_states", "token", "logits"})
_TABLE = "token_embeddings.weight"
_BLOCK = re.compile(r"backbone\.blocks\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Widths of one residual block; where it changes the width, its skip connection is a Linear."""

    width: int
    inner: int
    out: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a head.

    :param hidden: H, width of the hidden states.
    :param embedding: E, width of the token embeddings.
    :param top: how many of the largest logits it reads.
    :param width: outputs of the combined projection.
    :param normalize: inputs are normalised first: layer norms over h and e, softmax over the largest logits.
    """

    hidden: int
    embedding: int
    top: int
    width: int
    blocks: tuple[BlockSize, ...]
    normalize: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained tensor of a checkpoint, with its shape."""
        shapes = {
            **_linear("logits_projection", self.top, self.hidden),
            **_linear("combined_projection", 2 * self.hidden + self.embedding, self.width),
            **_linear("backbone.input_projection", self.width, self.blocks[0].width),
        }
        if self.normalize:
            shapes |= _norm("layer_norm_hidden_states", self.hidden) | _norm(
                "layer_norm_token", self.embedding
            )
        for index, block in enumerate(self.blocks):
            prefix = f"backbone.blocks.{index}"
            shapes |= _norm(f"{prefix}.layer_norm", block.width)
            shapes |= _linear(f"{prefix}.mlp.0", block.width, block.inner)
            shapes |= _linear(f"{prefix}.mlp.3", block.inner, block.out)
            if block.width != block.out:
                shapes |= _linear(f"{prefix}.dim_change", block.width, block.out)
        out = self.blocks[-1].out
        return shapes | _norm("backbone.output_layer.0", out) | _linear("backbone.output_layer.1", out, 1)


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [out, in] and a bias [out]."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Block:
    """A residual block over normalised inputs; ``skip`` is there only where the width changes."""

    up: Linear
    down: Linear
    skip: Linear | None

    def __call__(self, x: Tensor) -> Tensor:
        residual = x if self.skip is None else self.skip(x)
        return residual + self.down(F.gelu(self.up(_normalised(x))))


@dataclass(frozen=True, slots=True)
class R2RHead:
    """Probability that the sampled token is divergent (arXiv 2505.21600, section 3).

    :param table: token embeddings [V, E].
    :param top: how many of the largest raw logits are read, in falling order.
    :param normalize: normalise the inputs first.
    :param front: from concat(h, e, l), [H + E + top], to the first block.
    :param out: from the last block to one logit.
    """

    table: Tensor
    top: int
    normalize: bool
    front: Linear
    blocks: tuple[Block, ...]
    out: Linear
    threshold: float | None

    comparison: ClassVar[Comparison] = ">="
    excluded: ClassVar[tuple[int, ...]] = ()

    def score(self, hidden: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        dtype = self.out.weight.dtype
        embedded = F.embedding(tokens, self.table)
        largest = logits.topk(self.top, -1).values
        if self.normalize:
            hidden, embedded = _normalised(hidden.to(dtype)), _normalised(embedded.to(dtype))
            largest = largest.float().softmax(-1)
        x = self.front(torch.cat((hidden.to(dtype), embedded.to(dtype), largest.to(dtype)), -1))
        for block in self.blocks:
            x = block(x)
        return self.out(_normalised(x)).squeeze(-1).float().sigmoid()


def load_r2r(
    path: Path, *, embeddings: Tensor, hidden_size: int, device: torch.device, dtype: torch.dtype
) -> R2RHead:
    """Load a published checkpoint: a file, or the directory that holds it.

    :param embeddings: the model's own input embeddings [V, E]; used, uncopied, if the file has none.
    :raises ModelLoadError: if it cannot be read, is not of this kind, or was made for another model.
    """
    file = find_file(path)
    saved = read(file)
    require_kind(saved, "r2r", file)
    init_args, common_args = _arguments(saved, file)
    tensors = Tensors(saved["state_dict"], file)
    classes, _ = tensors.matrix("backbone.output_layer.1.weight")
    if classes != 1:
        raise ModelLoadError(f"{file}: a head of {classes} classes is not supported, only one probability")
    sizes = _sizes(tensors, normalize=init_args.get("normalize_input") is True)
    _check_fit(sizes, embeddings, hidden_size, file)
    own_table = {_TABLE: tuple(embeddings.shape)} if _TABLE in tensors else {}
    tensors.check(sizes.shapes() | own_table)

    def place(weight: Tensor, bias: Tensor) -> Linear:
        return Linear(weight.to(device, dtype), bias.to(device, dtype))

    return R2RHead(
        table=tensors.stored(_TABLE).to(device, dtype) if own_table else embeddings.to(device),
        top=sizes.top,
        normalize=sizes.normalize,
        front=place(*_front(tensors, sizes)),
        blocks=tuple(
            Block(
                up=place(*_after_norm(tensors, f"{prefix}.layer_norm", f"{prefix}.mlp.0")),
                down=place(*_pair(tensors, f"{prefix}.mlp.3")),
                skip=place(*_pair(tensors, f"{prefix}.dim_change")) if block.width != block.out else None,
            )
            for prefix, block in ((f"backbone.blocks.{i}", block) for i, block in enumerate(sizes.blocks))
        ),
        out=place(*_after_norm(tensors, "backbone.output_layer.0", "backbone.output_layer.1")),
        threshold=stored_threshold(common_args.get("threshold"), f"{file}: common_args.threshold"),
    )


def find_file(path: Path) -> Path:
    """The checkpoint in a directory: the first of :data:`FILE_NAMES` in it, else its first ``.pt`` file.

    :raises ModelLoadError: if a directory holds none.
    """
    if not path.is_dir():
        return path
    named = [path / name for name in FILE_NAMES if (path / name).is_file()]
    files = named or sorted(path.glob("*.pt"))
    if not files:
        raise ModelLoadError(f"{path}: no R2R checkpoint in it (a .pt file, {FILE_NAMES[0]} for one)")
    return files[0]


def _arguments(saved: Mapping[str, Any], file: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """``init_args`` and ``common_args`` of a checkpoint that this module can compute."""
    unknown = [str(key) for key in saved if key not in _PARTS]
    missing = [key for key in ("model_type", "state_dict") if key not in saved]
    if unknown or missing:
        found = (("missing", missing), ("unexpected", unknown))
        what = "; ".join(f"{word} {', '.join(keys)}" for word, keys in found if keys)
        raise ModelLoadError(f"{file}: not an R2R checkpoint: {what}")
    if saved["model_type"] != MODEL_TYPE:
        raise ModelLoadError(
            f"{file}: model_type {saved['model_type']!r} is not supported, only {MODEL_TYPE}"
        )
    init_args, common_args = saved.get("init_args", {}), saved.get("common_args", {})
    for name, value in (("init_args", init_args), ("common_args", common_args)):
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{file}: {name} must be a dictionary, got {type(value).__name__}")
    if init_args.get("use_position_embedding"):
        raise ModelLoadError(f"{file}: a head with a position embedding is not supported")
    inputs = common_args.get("input_type")
    if inputs is not None and (not isinstance(inputs, list) or set(map(str, inputs)) != _INPUTS):
        raise ModelLoadError(f"{file}: input_type must be {sorted(_INPUTS)} in any order, got {inputs!r}")
    return init_args, common_args


def _sizes(tensors: Tensors, *, normalize: bool) -> Sizes:
    """Dimensions from the tensors: what ``init_args`` says of them is wrong in some published configs."""
    hidden, top = tensors.matrix("logits_projection.weight")
    width, columns = tensors.matrix("combined_projection.weight")
    into, _ = tensors.matrix("backbone.input_projection.weight")
    numbers = [int(match[1]) for name in tensors.names() if (match := _BLOCK.match(name))]
    blocks = []
    for index in range(max(numbers, default=0) + 1):
        inner, _ = tensors.matrix(f"backbone.blocks.{index}.mlp.0.weight")
        out, _ = tensors.matrix(f"backbone.blocks.{index}.mlp.3.weight")
        blocks.append(BlockSize(into, inner, out))
        into = out
    return Sizes(hidden, columns - 2 * hidden, top, width, tuple(blocks), normalize)


def _check_fit(sizes: Sizes, embeddings: Tensor, hidden_size: int, file: Path) -> None:
    vocab, width = embeddings.shape
    if sizes.hidden != hidden_size:
        raise ModelLoadError(
            f"{file}: made for a model with hidden size {sizes.hidden} "
            f"(the rows of logits_projection.weight); this model's is {hidden_size}"
        )
    if sizes.embedding != width:
        raise ModelLoadError(
            f"{file}: made for token embeddings of width {sizes.embedding} "
            f"(the columns of combined_projection.weight less {2 * sizes.hidden}); this model's is {width}"
        )
    if sizes.top > vocab:
        raise ModelLoadError(f"{file}: reads the {sizes.top} largest logits; this model has only {vocab}")


def _front(tensors: Tensors, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """All linear maps in front of the first block as one, over concat(h, e, l)."""
    logits, logits_bias = _pair(tensors, "logits_projection")
    combined, combined_bias = _pair(tensors, "combined_projection")
    into, into_bias = _pair(tensors, "backbone.input_projection")
    of_hidden, of_token, of_logits = torch.split(combined, [sizes.hidden, sizes.embedding, sizes.hidden], 1)
    bias = combined_bias + of_logits @ logits_bias
    if sizes.normalize:
        bias = bias + of_hidden @ tensors["layer_norm_hidden_states.bias"]
        bias = bias + of_token @ tensors["layer_norm_token.bias"]
        of_hidden = of_hidden * tensors["layer_norm_hidden_states.weight"]
        of_token = of_token * tensors["layer_norm_token.weight"]
    weight = torch.cat((of_hidden, of_token, of_logits @ logits), 1)
    return into @ weight, into @ bias + into_bias


def _after_norm(tensors: Tensors, norm: str, linear: str) -> tuple[Tensor, Tensor]:
    """A Linear with the scale and shift of the layer norm before it."""
    scale, shift = _pair(tensors, norm)
    weight, bias = _pair(tensors, linear)
    return weight * scale, bias + weight @ shift


def _pair(tensors: Tensors, name: str) -> tuple[Tensor, Tensor]:
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def _normalised(x: Tensor) -> Tensor:
    """Layer normalisation (arXiv 1607.06450) without scale and shift, eps 1e-5."""
    return F.layer_norm(x, x.shape[-1:])


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
