"""Where this engine holds on to SGLang: one version, and what its inside must look like.

SGLang promises nothing about the inside of its packages, so the version is pinned and everything that is
called is checked when a model loads: a changed build is told by what changed, not by a strange traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

from tokenflow.errors import UnsupportedModel

VERSION = "0.5.23"
_HOW = "pip install 'tokenflow[sglang]'"
_AGAIN = f"pip install --force-reinstall --no-deps sglang=={VERSION}"
_SHOWN = 8

CALLS: dict[str, tuple[str, ...]] = {
    "sglang.srt.configs.model_config:ModelConfig.from_server_args": ("server_args",),
    "sglang.srt.distributed.bootstrap:init_layer_runtime": ("model_config",),
    "sglang.srt.distributed.bootstrap:init_parallel_runtime": ("server_args", "device", "dist_port"),
    "sglang.srt.distributed.parallel_state:destroy_distributed_environment": (),
    "sglang.srt.distributed.parallel_state:destroy_model_parallel": (),
    "sglang.srt.distributed.parallel_state:get_default_distributed_backend": ("device",),
    "sglang.srt.layers.logits_processor:LogitsMetadata.from_forward_batch": ("forward_batch",),
    "sglang.srt.layers.logits_processor:LogitsProcessor._get_logits": (
        "hidden_states",
        "lm_head",
        "logits_metadata",
        "use_logits_buffer",
    ),
    "sglang.srt.layers.moe:initialize_moe_config": (),
    "sglang.srt.layers.quantization.fp4_utils:initialize_fp4_gemm_config": (),
    "sglang.srt.layers.quantization.fp8_utils:initialize_fp8_gemm_config": (),
    "sglang.srt.layers.quantization.unquant:initialize_bf16_gemm_config": (),
    "sglang.srt.managers.schedule_batch:ScheduleBatch": (
        "reqs",
        "req_to_token_pool",
        "token_to_kv_pool_allocator",
        "model_config",
        "device",
        "forward_mode",
        "input_ids",
        "req_pool_indices",
        "req_pool_indices_cpu",
        "seq_lens",
        "seq_lens_cpu",
        "orig_seq_lens",
        "out_cache_loc",
        "multimodal_inputs",
        "prefix_lens",
        "extend_lens",
        "extend_logprob_start_lens",
        "extend_num_tokens",
        "spec_algorithm",
    ),
    "sglang.srt.managers.schedule_batch:Req": (
        "rid",
        "origin_input_text",
        "origin_input_ids",
        "sampling_params",
    ),
    "sglang.srt.mem_cache.memory_pool:KVCache.get_cpu_copy": ("indices",),
    "sglang.srt.mem_cache.memory_pool:KVCache.load_cpu_copy": ("kv_cache_cpu", "indices"),
    "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode.FULL": (),
    "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode.LAST": (),
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new": (
        "batch",
        "model_runner",
        "capture_hidden_mode",
        "return_hidden_states_before_norm",
    ),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode.DECODE": (),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode.EXTEND": (),
    "sglang.srt.model_executor.model_runner:ModelRunner": (
        "model_config",
        "mem_fraction_static",
        "gpu_id",
        "nccl_port",
        "server_args",
    ),
    "sglang.srt.model_executor.model_runner:ModelRunner.alloc_memory_pool": (),
    "sglang.srt.model_executor.model_runner:ModelRunner.forward": ("forward_batch",),
    "sglang.srt.model_executor.model_runner:ModelRunner.init_attention_backends": (),
    "sglang.srt.model_executor.model_runner:ModelRunner.init_cuda_graphs": (),
    "sglang.srt.models.registry:ModelRegistry.is_arch_supported": ("architecture",),
    "sglang.srt.runtime_context:SpawnRanks": ("world_rank", "gpu_id"),
    "sglang.srt.runtime_context:get_device": (),
    "sglang.srt.runtime_context:get_schedule": (),
    "sglang.srt.runtime_context:publish": ("server_args", "role", "ranks"),
    "sglang.srt.sampling.sampling_params:SamplingParams": (),
    "sglang.srt.server_args:ServerArgs": (
        "model_path",
        "device",
        "dtype",
        "context_length",
        "load_format",
        "page_size",
        "max_total_tokens",
        "max_running_requests",
        "mem_fraction_static",
        "tp_size",
        "attention_backend",
        "sampling_backend",
        "disable_cuda_graph",
        "disable_overlap_schedule",
        "disable_radix_cache",
        "return_hidden_states_mode",
        "skip_tokenizer_init",
        "log_level",
    ),
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.NONE": (),
    "sglang.srt.utils.hf_transformers_utils:get_config": ("model", "trust_remote_code"),
    "sglang.srt.utils.hf_transformers_utils:get_context_length": ("config",),
    "sglang.srt.utils.hf_transformers_utils:get_hf_text_config": ("config",),
}
"""Everything that is called, as ``module:name``, with the arguments that it is given."""


def require_sglang() -> None:
    """Refuse to go on without the one version of SGLang; imports nothing of it.

    :raises UnsupportedModel: with what to install.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedModel(f"engine 'sglang' needs SGLang {VERSION}: {_HOW}") from None
    if found != VERSION:
        raise UnsupportedModel(f"engine 'sglang' needs SGLang {VERSION}, found {found}: {_HOW}")
    if importlib.util.find_spec("sglang") is None:
        raise UnsupportedModel(
            f"engine 'sglang' needs SGLang {VERSION}, of which only the metadata is installed: {_AGAIN}"
        )


def check_seams() -> None:
    """Compare what is called with what is there.

    :raises UnsupportedModel: with the first differences, and how many there are.
    """
    changes = [change for name, given in CALLS.items() for change in changes_of(name, given)]
    if changes:
        shown = [*changes[:_SHOWN], *([f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else [])]
        raise UnsupportedModel(
            f"this build of SGLang is not {VERSION} as released ({_AGAIN}): " + "; ".join(shown)
        )


def changes_of(name: str, given: tuple[str, ...]) -> Iterator[str]:
    """What keeps ``name`` from being called with the arguments ``given``; nothing if it can be.

    :raises UnsupportedModel: if its module cannot be imported for lack of something else.
    """
    module, _, path = name.partition(":")
    found: Any
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and _package(error.name) != _package(module):
            raise _cannot_import(error) from error
        yield f"{name} is gone ({error})"
        return
    except (OSError, RuntimeError) as error:
        raise _cannot_import(error) from error
    try:
        parameters = dict(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return  # a member of an enumeration, not called
    parameters.pop("self", None)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for missing in () if open_ended else [argument for argument in given if argument not in parameters]:
        yield f"{name} no longer takes {missing!r}"
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if required and parameter.name not in given:
            yield f"{name} now needs {parameter.name!r}"


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _cannot_import(error: Exception) -> UnsupportedModel:
    why = next(iter(str(error).splitlines()), type(error).__name__)
    return UnsupportedModel(
        f"SGLang cannot be imported here: {why}; it needs a GPU with CUDA and all that {_HOW} brings; "
        "engine 'torch' does without"
    )
