"""Weights of a dense decoder from safetensors files, checked against the config and fused for speed.

Pickled checkpoints (``pytorch_model.bin``) are never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenflow.engines.tensors import INDEX, derived, read_index, require_fit
from tokenflow.engines.torch.config import ModelSpec
from tokenflow.engines.torch.linear import Linear
from tokenflow.errors import ModelLoadError, UnsupportedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Norm:
    """Root mean square normalisation (arXiv 1910.07467) over the last dimension, times a weight.

    On a CPU it is computed as ``x * sqrt(n) * weight / hypot(|x|, sqrt(n * eps))``, which takes half as many
    passes as the textbook form; always in float32.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[-1]
        self._weight = weight
        self._eps = eps
        self._shape = (width,)
        self._scale = weight.float() * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return torch.rms_norm(x, self._shape, None, self._eps) * self._weight
        wide = x.float()
        length = torch.hypot(torch.linalg.vector_norm(wide, 2, -1, True), self._floor)
        return (wide / length).mul_(self._scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    ``qkv`` stacks query, key and value heads, ``gate_up`` the two halves of the gated MLP.  ``qk_norm`` is
    over each query and key head, its weight [heads + kv_heads, head_dim].
    """

    attn_norm: Norm
    qkv: Linear
    qk_norm: Norm | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights; ``embed`` is [V, H]."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear


def load_weights(path: Path, spec: ModelSpec, dtype: str, device: torch.device) -> Weights:
    """Load every tensor of the model in ``path`` as ``dtype`` (``auto``: as the embedding is stored).

    :raises ModelLoadError: if files or tensors are missing, left over, damaged or of the wrong shape.
    :raises UnsupportedModel: if the tensors are stored in a type that the forward pass does not compute in.
    """
    with ExitStack() as stack:
        source = _Source(path, stack)
        source.check(_shapes(spec))
        stored = source.dtype(_EMBED)
        target = DTYPES[stored if dtype == "auto" else dtype]

        def get(name: str) -> Tensor:
            return source.tensor(name).to(device, target)

        embed = get(_EMBED)
        return Weights(
            embed=embed,
            layers=tuple(_layer(get, spec, f"model.layers.{index}.") for index in range(spec.layers)),
            norm=Norm(get(_NORM), spec.norm_eps),
            head=Linear(embed if spec.tied else get(_HEAD)),
        )


def _layer(get: Any, spec: ModelSpec, prefix: str) -> Layer:
    def linear(names: str, bias: bool) -> Linear:
        def stacked(kind: str) -> Tensor:
            return torch.cat([get(f"{prefix}{name}.{kind}") for name in names.split()])

        return Linear(stacked("weight"), stacked("bias") if bias else None)

    qk_norm = None
    if spec.qk_norm:
        q, k = get(prefix + "self_attn.q_norm.weight"), get(prefix + "self_attn.k_norm.weight")
        qk_norm = Norm(torch.cat((q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1))), spec.norm_eps)
    return Layer(
        attn_norm=Norm(get(prefix + "input_layernorm.weight"), spec.norm_eps),
        qkv=linear("self_attn.q_proj self_attn.k_proj self_attn.v_proj", spec.qkv_bias),
        qk_norm=qk_norm,
        out=linear("self_attn.o_proj", spec.out_bias),
        mlp_norm=Norm(get(prefix + "post_attention_layernorm.weight"), spec.norm_eps),
        gate_up=linear("mlp.gate_proj mlp.up_proj", spec.mlp_bias),
        down=linear("mlp.down_proj", spec.mlp_bias),
    )


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model must have, with its shape."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matrices = {
        "self_attn.q_proj": (q, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q, spec.out_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    vectors = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.qk_norm:
        vectors |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {_EMBED: (spec.vocab_size, hidden), _NORM: (hidden,)}
    if not spec.tied:
        shapes[_HEAD] = (spec.vocab_size, hidden)
    for index in range(spec.layers):
        prefix = f"model.layers.{index}."
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, width in vectors.items():
            shapes[f"{prefix}{name}.weight"] = (width,)
    return shapes


class _Source:
    """The safetensors files of a directory as one mapping of names to tensors."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._files = dict(self._locate())

    def _locate(self) -> Iterator[tuple[str, tuple[str, Any]]]:
        single, index = self._path / "model.safetensors", self._path / INDEX
        if index.is_file():
            mapping = read_index(index)
            opened = {name: self._open(self._path / name) for name in sorted(set(mapping.values()))}
            held = {name: set(file.keys()) for name, file in opened.items()}
            for tensor, name in mapping.items():
                if tensor not in held[name]:
                    raise ModelLoadError(f"{index}: {tensor} is said to be in {name}, which does not hold it")
                yield tensor, (name, opened[name])
        elif single.is_file():
            file = self._open(single)
            for tensor in file.keys():  # noqa: SIM118 - a handle, not a mapping
                yield tensor, (single.name, file)
        else:
            raise ModelLoadError(
                f"{self._path}: neither model.safetensors nor model.safetensors.index.json found; "
                "only safetensors weights are read"
            )

    def _open(self, file: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{file}: cannot be opened: {error}") from error

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the stored tensors with the wanted ones before any is loaded."""
        tied = _HEAD not in shapes
        require_fit(
            self._path,
            {
                name: (file, tuple(opened.get_slice(name).get_shape()))
                for name, (file, opened) in self._files.items()
            },
            shapes,
            ignored=lambda name: derived(name) or (tied and name == _HEAD),
        )

    def dtype(self, name: str) -> str:
        stored = str(self._files[name][1].get_slice(name).get_dtype())
        if stored not in _STORED:
            raise UnsupportedModel(
                f"{self._path}: weights are stored as {stored}; "
                f"the torch engine computes in {', '.join(DTYPES)}"
            )
        return _STORED[stored]

    def tensor(self, name: str) -> Tensor:
        try:
            tensor = self._files[name][1].get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{self._path}: {name} cannot be read: {error}") from error
        assert isinstance(tensor, Tensor)
        return tensor
