"""What a Hugging Face directory says about a model: ``config.json`` and ``generation_config.json``.

Both forms of the rotary settings are read: ``rope_theta`` with ``rope_scaling``, and the nested
``rope_parameters`` that transformers 5 writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenflow.engines.config import Reader, read_json
from tokenflow.errors import ModelNotFound, UnsupportedModel

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KINDS = ("default", "llama3", "yarn")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: how fast each pair of channels turns with the position.

    :param kind: ``default``, ``llama3`` or ``yarn``; the other fields are theirs.
    :param theta: base of the wavelengths.
    :param factor: how far the context is stretched.
    :param original_length: context of the training before the stretch, in tokens.
    :param low_freq_factor: ``llama3``: wavelengths above ``original_length / low_freq_factor`` are stretched.
    :param high_freq_factor: ``llama3``: those below ``original_length / high_freq_factor`` are kept.
    :param beta_fast: ``yarn``: channels that turn more often than this over the original context are kept.
    :param beta_slow: ``yarn``: those that turn less often are stretched.
    :param attention_factor: ``yarn``: scale of cosine and sine.
    :param truncate: ``yarn``: round the bounds of the ramp to whole channels.
    """

    kind: Literal["default", "llama3", "yarn"] = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape and constants of a dense decoder model.

    :param heads: query heads; ``kv_heads`` of them share their keys and values in groups.
    :param context_length: most positions that the model knows.
    :param tied: the LM head is the embedding.
    :param qkv_bias: the query, key and value projections have a bias; likewise ``out_bias``, ``mlp_bias``.
    :param qk_norm: queries and keys are normalised per head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    eos_token_ids: tuple[int, ...]


def read_spec(path: Path, context_length: int | None = None) -> ModelSpec:
    """Read the model's shape from the directory ``path``, for requests of up to ``context_length`` tokens.

    :raises ModelNotFound: if there is no such directory.
    :raises UnsupportedModel: for an architecture or option that the forward pass does not implement.
    :raises ModelLoadError: if ``config.json`` is missing, broken or contradicts itself, or if
        ``context_length`` is more than the model knows.
    """
    if not path.is_dir():
        raise ModelNotFound(f"{path}: no such directory")
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    reader = Reader(raw, str(path / "config.json"))
    family = _family(reader)
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    hidden = reader.integer("hidden_size")
    head_dim = reader.integer("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise reader.wrong(
            f"{heads} query heads over {kv_heads} key-value heads of width {head_dim}: "
            "the heads must divide evenly and the width must be even"
        )
    if (act := reader.get("hidden_act", "silu")) != "silu":
        raise _unsupported(reader, f"hidden_act {act!r}", "silu")
    if reader.get("quantization_config") is not None:
        raise _unsupported(reader, "a quantised checkpoint", "float32, bfloat16 and float16 weights")
    rope = _rope(reader)
    longest = _longest(reader, rope)
    if context_length is not None and context_length > longest:
        raise reader.wrong(f"context_length {context_length} is more than the model's {longest} positions")
    _refuse_sliding_window(reader, context_length or longest)
    bias = family == "qwen2" or bool(reader.get("attention_bias", False))
    return ModelSpec(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        layers=reader.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        context_length=context_length or longest,
        tied=bool(reader.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        out_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(reader.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        rope=rope,
        eos_token_ids=_eos(read_json(generation) if generation.is_file() else {}, raw),
    )


def _unsupported(reader: Reader, what: str, supported: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{reader.where}: {what} is not supported by the torch engine; supported: {supported}"
    )


def _family(reader: Reader) -> str:
    names = reader.architectures()
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        what = f"architecture {', '.join(names) or 'not named in the config'}"
        raise _unsupported(reader, what, ", ".join(ARCHITECTURES))
    return ARCHITECTURES[known[0]]


def _rope(reader: Reader) -> RopeSpec:
    scaling = reader.get("rope_scaling") or reader.get("rope_parameters", {})
    if not isinstance(scaling, dict):
        raise reader.wrong(f"rope settings must be an object, got {scaling!r}")
    rope = Reader({"rope_theta": reader.get("rope_theta", _DEFAULT_THETA), **scaling}, reader.where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS or any(isinstance(value, dict) for value in scaling.values()):
        raise _unsupported(reader, f"rope type {kind!r} ({scaling})", ", ".join(ROPE_KINDS))
    partial = rope.get("partial_rotary_factor", reader.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise _unsupported(reader, f"partial_rotary_factor {partial}", "rotation of the whole head")
    theta = rope.number("rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    positions = reader.integer("max_position_embeddings")
    length = reader.integer(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings", positions)
    )
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise reader.wrong(f"low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeSpec(
            kind="llama3",
            theta=theta,
            factor=rope.number("factor"),
            original_length=length,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = rope.number("factor", positions / length)
    return RopeSpec(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_length=length,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention_factor(rope: Reader, factor: float) -> float:
    """YaRN (arXiv 2309.00071), section 3.4: the attention is sharpened by ``0.1 ln(factor) + 1``."""

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = rope.get("attention_factor")
    if given is not None:
        return rope.number("attention_factor")
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)


def _longest(reader: Reader, rope: RopeSpec) -> int:
    positions = reader.integer("max_position_embeddings")
    stretched = int(rope.factor * rope.original_length) if rope.kind == "yarn" else 0
    return max(positions, stretched)


def _refuse_sliding_window(reader: Reader, context_length: int) -> None:
    """A window that is never shorter than the context changes nothing, and is let through."""
    window = reader.get("sliding_window")
    if window is None or not reader.get("use_sliding_window", False) or window >= context_length:
        return
    layers = reader.integer("num_hidden_layers")
    default = ["sliding_attention"] * max(0, layers - int(reader.get("max_window_layers", 28)))
    if any(kind != "full_attention" for kind in reader.get("layer_types", default)):
        raise _unsupported(
            reader,
            f"a sliding window of {window} tokens",
            f"full attention (or set context_length to {window} or less, where the window changes nothing)",
        )


def _eos(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))
