"""What a model takes of its device's memory, and how much of that all models may take together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenflow.errors import ModelLoadError
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import Claim, DeviceShare

_USABLE = 0.9
"""The rest is for activations, and for what else comes and goes."""
_CPU_CACHE_SHARE, _CPU_CACHE_MOST = 4, 8 * 2**30
"""A CPU's memory is the machine's: KV caches take a part of what is free, within reason."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_HEAD = "lm_head.weight"
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


Packs = Callable[[int, torch.dtype, torch.device], bool]
"""Whether an engine keeps a matrix of so many elements in a layout of its own."""


def claim_of(
    config: ModelConfig, device: torch.device, ranks: int = 1, *, packs: Packs = lambda *_: False
) -> Claim:
    """What a dense decoder in Hugging Face layout takes, read from its files; nothing is loaded.

    :param device: the first device that it runs on.
    :param ranks: how many GPUs, from that one on, share the model.
    :param packs: a matrix that the engine packs and needs as it is as well, it has twice: a tied head.
    :raises ModelLoadError: if its files do not say.
    """
    path = Path(config.path)
    raw = _text_config(path)
    try:
        heads = raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
        layers, kv_heads = raw["num_hidden_layers"], raw.get("num_key_value_heads") or heads
        context = config.context_length or raw["max_position_embeddings"]
    except KeyError as error:
        raise ModelLoadError(f"{path / 'config.json'}: {error} is missing") from error
    tied, head = bool(raw.get("tie_word_embeddings")), raw.get("vocab_size", 0) * raw.get("hidden_size", 0)
    stored, stored_bytes = _stored(path, unused=_HEAD if tied else "")
    dtype = stored if config.dtype == "auto" else config.dtype
    if dtype not in _BYTES:
        raise ModelLoadError(f"dtype must be auto or one of {', '.join(_BYTES)}, got {dtype!r}")
    width = _BYTES[dtype]
    ranks = ranks if device.type == "cuda" else 1
    token_bytes = 2 * layers * -(-kv_heads // ranks) * head_dim * width
    weights = stored_bytes * width // _BYTES[stored] // ranks
    if tied and packs(head, getattr(torch, dtype), device):
        weights += head * width
    shares = [
        _share(torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device)
        for rank in range(ranks)
    ]
    return Claim(
        [DeviceShare(name, usable, cache, weights, token_bytes) for name, usable, cache in shares],
        config.max_requests * context,
    )


def alone(claim: Claim) -> int:
    """Tokens of KV cache for a model that has its device to itself; at least one."""
    rooms = ((min(share.usable - share.weights, share.cache) // share.token) for share in claim.shares)
    return max(min(claim.most_tokens, *rooms), 1)


def _share(device: torch.device) -> tuple[str, int, int]:
    """A device's name, the bytes that models may take of it, and those that their KV caches may."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return str(device), int(free * _USABLE), int(free * _USABLE)
    free = available_bytes()
    return "cpu", int(free * _USABLE), min(free // _CPU_CACHE_SHARE, _CPU_CACHE_MOST)


def available_bytes() -> int:
    """Memory of the machine, or of the container, that is not in use."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if _MEMINFO.is_file():
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        free = {words[0]: int(words[1]) * 1024 for words in lines}.get("MemAvailable:", free)
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(int(text) - int(used.read_text()), 0))
    return free


def _text_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from error
    return {**raw, **raw.get("text_config", {})}


def _stored(path: Path, unused: str) -> tuple[str, int]:
    """The dtype of a checkpoint's first tensor, and the bytes of all its tensors but ``unused``."""
    files = sorted(path.glob("*.safetensors"))
    total, dtype = 0, "float32"
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            try:
                header = json.loads(opened.read(length))
            except ValueError as error:
                raise ModelLoadError(f"{file}: cannot be read: {error}") from error
        tensors = [entry for name, entry in header.items() if name not in ("__metadata__", unused)]
        for entry in tensors:
            start, end = entry["data_offsets"]
            total += end - start
        if tensors:
            dtype = _STORED.get(tensors[0]["dtype"], dtype)
    if not files:
        raise ModelLoadError(f"{path}: no safetensors files found; only safetensors weights are read")
    return dtype, total
