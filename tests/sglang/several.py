"""Several engines in one process: not what SGLang is made for, which keeps its process groups in globals."""

from __future__ import annotations

from pathlib import Path

from tokenflow.engines.sglang import SglangEngine
from tokenflow.settings import prepare_sglang
from tokenflow.types import ModelConfig


def make_engine(model: Path, **config: object) -> SglangEngine:
    """An engine on the CPU; those made before it go on as they were, their groups are of one process."""
    prepare_sglang(cpu=True)
    from sglang.srt.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()
    return SglangEngine(ModelConfig(path=str(model), device="cpu", **config))  # type: ignore[arg-type]
