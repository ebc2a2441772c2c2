"""Loading one rank of a model into this process: SGLang's own ``ModelRunner``, without its scheduler.

This follows SGLang's one-batch benchmark (``sglang/benchmark/one_batch.py``).  SGLang keeps its
configuration and its process groups per process, so a process runs one model.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tokenflow.engines.config import decoder_facts
from tokenflow.engines.memory import alone, claim_of, stored_sizes
from tokenflow.engines.sglang.fit import check_fit
from tokenflow.engines.sglang.seams import VERSION, check_seams
from tokenflow.errors import ModelLoadError, TokenflowError, UnsupportedModel
from tokenflow.settings import SGLANG_CORES, prepare_sglang, sglang_cores
from tokenflow.types import ModelConfig

BLOCK_SIZE = 16
"""Tokens per block of KV cache, unless an attention backend wants another number."""

HOST = "127.0.0.1"
_MEETING_S = 300
_SHOWN = 400
_NODES = Path("/sys/devices/system/node")
_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_KV_SHARE = 0.95
"""Share of a GPU that SGLang may use where ``kv_cache`` bounds it anyway."""


def load_runner(
    config: ModelConfig, rank: int, store: Store, meeting: int, *, cuda_graphs: bool, load_format: str
) -> Any:
    """A ``ModelRunner`` with weights, KV cache, attention backend and, on a GPU, CUDA graphs.

    :param store: where the ranks find each other.
    :param meeting: a number of this model that no other model on the machine has.
    :raises UnsupportedModel: for a model whose memory is not a plain KV cache, or a changed SGLang.
    :raises ModelLoadError: if SGLang cannot load it.
    """
    device, index = place_of(config.device, rank)
    prepare_sglang(cpu=device == "cpu")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="sglang")
    hide_progress()
    check_seams()
    try:
        if rank == 0 and load_format == "safetensors":
            require_architecture(Path(config.path))
            check_fit(Path(config.path))
        if rank == 0 and config.context_length is not None:
            require_positions(Path(config.path), config.context_length)
        return _load(config, rank, store, meeting, device, index, cuda_graphs, load_format)
    except TokenflowError:
        raise
    except Exception as error:  # of SGLang's, transformers' and torch's code, whose errors have no base
        said = " ".join(str(error).split())
        raise ModelLoadError(
            f"SGLang cannot load {config.path}: {type(error).__name__}: {said:.{_SHOWN}}"
        ) from error


def _load(
    config: ModelConfig,
    rank: int,
    store: Store,
    meeting: int,
    device: str,
    index: int,
    cuda_graphs: bool,
    load_format: str,
) -> Any:
    from sglang.srt.configs.model_config import ModelConfig as SglangModelConfig
    from sglang.srt.distributed.bootstrap import init_layer_runtime, init_parallel_runtime
    from sglang.srt.distributed.parallel_state import get_default_distributed_backend
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, get_schedule, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(**server_arguments(config, device, cuda_graphs, load_format))
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=index))
    if not dist.is_initialized():
        dist.init_process_group(
            backend=get_default_distributed_backend(device),
            store=store,
            rank=rank,
            world_size=config.tensor_parallel,
            timeout=timedelta(seconds=_MEETING_S),
        )
    for initialize in (
        initialize_moe_config,
        initialize_fp8_gemm_config,
        initialize_bf16_gemm_config,
        initialize_fp4_gemm_config,
    ):
        initialize()
    model_config = SglangModelConfig.from_server_args(args)
    init_parallel_runtime(server_args=args, device=get_device().device, dist_port=meeting)
    init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=get_schedule().mem_fraction_static,
        gpu_id=index,
        nccl_port=meeting,
        server_args=args,
    )
    runner.alloc_memory_pool()
    _refuse_other_memory(runner, config)
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def server_arguments(config: ModelConfig, device: str, cuda_graphs: bool, load_format: str) -> dict[str, Any]:
    """The fields of SGLang's ``ServerArgs`` that matter to a model whose scheduling is not SGLang's.

    :raises ModelLoadError: if the KV cache holds nothing.
    """
    if config.kv_cache is not None and config.kv_cache < BLOCK_SIZE:
        raise ModelLoadError(f"kv_cache of {config.kv_cache} tokens is too small: a block has {BLOCK_SIZE}")
    # SGLang's own ``auto`` would halve float32.
    dtype = stored_sizes(Path(config.path)).dtype if config.dtype == "auto" else config.dtype
    arguments: dict[str, Any] = {
        "model_path": config.path,
        "device": device,
        "dtype": dtype,
        "context_length": config.context_length,
        "load_format": load_format,
        "page_size": BLOCK_SIZE,
        "max_total_tokens": config.kv_cache,
        # One more row than requests: scoring uses it.
        "max_running_requests": config.max_requests + 1,
        "mem_fraction_static": None if config.kv_cache is None else _KV_SHARE,
        "tp_size": config.tensor_parallel,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": device == "cpu" or not cuda_graphs,
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "return_hidden_states_mode": "last",
        "skip_tokenizer_init": True,
        "log_level": "error",
    }
    if device == "cpu":
        arguments |= {"attention_backend": "torch_native", "mem_fraction_static": _KV_SHARE}
        if config.kv_cache is None:
            arguments["max_total_tokens"] = alone(claim_of(config, torch.device("cpu")))
    return arguments


def require_architecture(path: Path) -> None:
    """Refuse a model that nobody here can build, in our words.

    :raises ModelLoadError: if its ``config.json`` cannot be read.
    :raises UnsupportedModel: if neither SGLang nor transformers, to which it turns, knows the architecture.
    """
    import transformers
    from sglang.srt.models.registry import ModelRegistry

    facts = decoder_facts(path)
    for name in facts.architectures()[:1]:
        if not ModelRegistry.is_arch_supported(name) and not hasattr(transformers, name):
            raise UnsupportedModel(
                f"{facts.where}: architecture {name} is not supported by SGLang {VERSION}; "
                "change architectures, or choose another model"
            )


def require_positions(path: Path, context_length: int) -> None:
    """Refuse requests that are longer than what the model knows, in our words.

    :raises ModelLoadError: if they are.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_hf_text_config

    known = get_context_length(get_hf_text_config(get_config(str(path), trust_remote_code=False)))
    if context_length > known:
        raise ModelLoadError(
            f"{path / 'config.json'}: context_length {context_length} is more than the model's {known} "
            "positions; lower it, or raise max_position_embeddings if the model knows more"
        )


def hide_progress() -> None:
    """Draw no progress bars: a worker's standard error is a log, and SGLang's loaders always want them."""
    from tqdm import tqdm

    begin = tqdm.__init__
    if hasattr(begin, "__wrapped__"):
        return

    @wraps(begin)
    def begin_hidden(bar: Any, *args: Any, **settings: Any) -> None:
        begin(bar, *args, **settings | {"disable": True})

    tqdm.__init__ = begin_hidden  # type: ignore[method-assign, assignment]


def lone_meeting() -> int:
    """A number for :func:`load_runner` where there is one rank only: nothing listens there."""
    return 1024 + os.getpid() % (2**16 - 1024)


def place_of(name: str, rank: int) -> tuple[str, int]:
    """SGLang's name of the device, and which one of them rank ``rank`` has.

    :raises ModelLoadError: if there are not so many, or on a CPU no cores for each.
    """
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not count):
        _require_cores(rank)
        return "cpu", rank
    index = int(name.partition(":")[2] or 0) + rank
    if index >= count:
        raise ModelLoadError(
            f"rank {rank} needs CUDA device {index}, and this machine has {count} of them; "
            "change device or tensor_parallel"
        )
    return "cuda", index


def _require_cores(rank: int) -> None:
    """Ranks on a CPU have cores of their own: a NUMA node each, or what the environment says.

    :raises ModelLoadError: if a rank up to ``rank`` has none, or some that are not there.
    """
    groups = sglang_cores()
    if groups is None:
        nodes = max(len(list(_NODES.glob("node[0-9]*"))), 1)
        found, why = nodes, f"this machine has {nodes} NUMA node(s), of which each rank gets one"
    else:
        found, why = len(groups), f"{SGLANG_CORES} is {'|'.join(groups)!r}"
    if rank >= found:
        raise ModelLoadError(
            f"tensor_parallel: rank {rank} has no cores: {why}; set {SGLANG_CORES} to the cores of "
            f"every rank, as in {'|'.join(map(str, range(rank + 1)))}, or lower tensor_parallel"
        )
    usable = os.sched_getaffinity(0)
    for group in groups[: rank + 1] if groups else ():
        missing = next((core for core in _cores(group) if core not in usable), None)
        if missing is not None:
            raise ModelLoadError(
                f"{SGLANG_CORES} has {group!r} for the cores of a rank, and there is no core {missing} for "
                f"this process; it may use {','.join(map(str, sorted(usable)))}"
            )


def _cores(group: str) -> Iterator[int]:
    """The cores of a rank, as the environment has them; :raises ModelLoadError: if it has something else."""
    parts = [part.partition("-") for part in group.split(",")]
    if not _CORES.fullmatch(group) or any(last and int(first) > int(last) for first, _, last in parts):
        raise ModelLoadError(
            f"{SGLANG_CORES} has {group!r} for the cores of a rank; it must be like 0-3 or 0,2, with | "
            "between the ranks"
        )
    for first, _, last in parts:
        yield from range(int(first), int(last or first) + 1)


def _refuse_other_memory(runner: Any, config: ModelConfig) -> None:
    """Sliding windows, state-space layers and encoders keep memory that is not one entry per token."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    if (
        runner.is_hybrid_swa
        or type(runner.req_to_token_pool) is not ReqToTokenPool
        or runner.model_config.is_encoder_decoder
        or not runner.is_generation
    ):
        raise UnsupportedModel(
            f"{config.path}: engine 'sglang' runs decoder models with full attention in every layer; "
            f"this one ({type(runner.model).__name__}) keeps other state"
        )
