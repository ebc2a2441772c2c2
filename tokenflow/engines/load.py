"""Engines by name."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenflow.engines.base import Engine
from tokenflow.errors import UnsupportedModel
from tokenflow.types import ModelConfig
from tokenflow.wire.messages import Claim

logger = logging.getLogger(__name__)

ENGINES = ("torch", "sglang", "openai")


def load_engine(config: ModelConfig) -> Engine:
    """Load the model of ``config``, whose ``path`` is a local directory, with the engine that it names.

    ``engine`` is one of :data:`ENGINES`, or ``FILE.py:NAME``: a callable of that file which takes the
    config and returns an :class:`Engine`.

    :raises UnsupportedModel: for an engine that does not exist, or a model that it does not implement.
    :raises ModelLoadError: if the model cannot be loaded.
    """
    if ":" in config.engine:
        return _import_own(config.engine)(config)
    if config.engine not in ENGINES:
        raise UnsupportedModel(f"engine {config.engine!r} does not exist; engines: {', '.join(ENGINES)}")
    # Imported where they are needed: each brings much that the others can do without.
    if config.engine == "sglang":
        from tokenflow.engines.sglang.seams import require_sglang

        require_sglang()
        from tokenflow.engines.sglang import SglangEngine

        return SglangEngine(config)
    if config.engine == "openai":
        from tokenflow.engines.openai import OpenAIEngine

        return OpenAIEngine(config)
    from tokenflow.engines.torch import TorchEngine

    if config.tensor_parallel > 1:
        logger.warning(
            "tensor_parallel=%d is ignored: the torch engine runs %s on one device",
            config.tensor_parallel,
            config.path,
        )
    return TorchEngine(config)


def claim(config: ModelConfig) -> Claim:
    """What the model of ``config`` will take of its device, before anything is loaded.

    A callable that stands for an engine may have a ``claim`` of its own, which takes the config; without
    one it sees to its memory itself.

    :raises UnsupportedModel: for an engine that does not exist, or is not installed.
    :raises ModelLoadError: if its files do not say, or its devices are not there.
    """
    if ":" in config.engine:
        own: Callable[[ModelConfig], Claim] | None = getattr(_import_own(config.engine), "claim", None)
        return Claim([], 0) if own is None else own(config)
    if config.engine not in ENGINES:
        raise UnsupportedModel(f"engine {config.engine!r} does not exist; engines: {', '.join(ENGINES)}")
    from tokenflow.engines.memory import claim_of
    from tokenflow.engines.torch.engine import device_of

    if config.engine == "sglang":
        from tokenflow.engines.sglang.load import place_of
        from tokenflow.engines.sglang.seams import require_sglang

        require_sglang()
        device = device_of(config.device)
        place_of(config.device, config.tensor_parallel - 1)
        return claim_of(config, device, config.tensor_parallel)
    from tokenflow.engines.torch.config import read_spec
    from tokenflow.engines.torch.linear import packs

    read_spec(Path(config.path), config.context_length)
    return claim_of(config, device_of(config.device), packs=packs)


@cache
def _import_own(engine: str) -> Callable[[ModelConfig], Engine]:
    file, _, name = engine.rpartition(":")
    try:
        spec = importlib.util.spec_from_file_location(f"tokenflow_engine_{Path(file).stem}", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        make: Callable[[ModelConfig], Engine] = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise UnsupportedModel(f"engine {engine!r} cannot be imported: {error}") from error
    return make
