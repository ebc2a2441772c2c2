"""What a model takes of its device's memory, and how much of that all models may take together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tokenflow.engines.config import Reader, decoder_facts
from tokenflow.engines.tensors import stored_tensors
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
    """What a decoder in Hugging Face layout takes, read from its files; nothing is loaded.

    :param device: the first device that it runs on.
    :param ranks: how many GPUs, from that one on, share the model.
    :param packs: a matrix that the engine packs and needs as it is as well, it has twice: a tied head.
    :raises ModelLoadError: if its files do not say.
    """
    path = Path(config.path)
    facts = decoder_facts(path)
    ranks = ranks if device.type == "cuda" else 1
    entry = _entry(facts, ranks) * facts.integer("num_hidden_layers")
    context = config.context_length or facts.integer("max_position_embeddings")
    tied, head = (
        bool(facts.get("tie_word_embeddings")),
        facts.integer("vocab_size") * facts.integer("hidden_size"),
    )
    stored = stored_sizes(path, unused=_HEAD if tied else "")
    dtype = stored.dtype if config.dtype == "auto" else config.dtype
    if dtype not in _BYTES:
        raise ModelLoadError(f"dtype must be auto or one of {', '.join(_BYTES)}, got {dtype!r}")
    width = _BYTES[dtype]
    token_bytes = entry * width
    weights = (stored.floats * width + stored.other_bytes) // ranks
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


def _entry(facts: Reader, ranks: int) -> int:
    """Numbers that one layer keeps of a token on each rank: keys and values, or what they are made from."""
    if facts.get("kv_lora_rank"):
        return facts.integer("kv_lora_rank") + facts.integer("qk_rope_head_dim")
    heads = facts.integer("num_attention_heads")
    kv_heads = facts.integer("num_key_value_heads", heads)
    head_dim = facts.integer("head_dim", facts.integer("hidden_size") // heads)
    if heads % kv_heads:
        raise facts.wrong(f"{heads} query heads over {kv_heads} key-value heads: they must divide evenly")
    return 2 * -(-kv_heads // ranks) * head_dim


class Stored(NamedTuple):
    """The tensors of a checkpoint.

    :param dtype: that of most of the numbers which are stored as they are computed with.
    :param floats: how many numbers those are: they are loaded in the dtype that is asked for.
    :param other_bytes: the size of all others, quantised weights above all, which stay as they are.
    """

    dtype: str
    floats: int
    other_bytes: int


def stored_sizes(path: Path, unused: str = "") -> Stored:
    """Read from the headers of the files.

    :param unused: a tensor that is not loaded.
    :raises ModelLoadError: if there are no files, or broken ones.
    """
    sizes: Counter[str] = Counter()
    for name, tensor in stored_tensors(path).items():
        if name != unused:
            sizes[tensor.dtype] += tensor.size
    floats = Counter({name: sizes.pop(key, 0) // _BYTES[name] for key, name in _STORED.items()})
    return Stored(floats.most_common(1)[0][0], floats.total(), sizes.total())
