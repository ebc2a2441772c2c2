"""Several engines in one process: not what SGLang is made for, which keeps its process groups in globals."""

from __future__ import annotations

from pathlib import Path

from tokenflow.engines.sglang import SglangEngine
from tokenflow.settings import prepare_sglang
from tokenflow.types import ModelConfig


def make_engine(model: Path, device: str = "cpu", **config: object) -> SglangEngine:
    """An engine without CUDA graphs; those made before it go on, since their groups are of one process."""
    prepare_sglang(cpu=device == "cpu")
    from sglang.srt.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()
    settings = ModelConfig(path=str(model), device=device, **config)  # type: ignore[arg-type]
    return SglangEngine(settings, cuda_graphs=False)
