"""Whether a checkpoint holds the model that its config.json describes, found out before it is loaded.

SGLang fills its fused and sharded parameters with what it is given: it cuts off what is too long, leaves what
is too short as it was, and says nothing of what is missing.  What should be there is what transformers, whose
layout it is, would have: the model without memory for its numbers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tokenflow.engines.config import decoder_facts
from tokenflow.engines.tensors import Shape, StoredTensor, derived, require_fit, stored_tensors
from tokenflow.errors import UnsupportedModel

logger = logging.getLogger(__name__)

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_MAY_LACK = frozenset({"intermediate_size", "num_key_value_heads"})
_QUANTISED = ("quantization_config", "compression_config")
_WHOLE = frozenset({"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Element types in which a tensor has the shape of the model's; narrower ones are packed."""


def check_fit(path: Path) -> None:
    """Compare the headers of the weight files in ``path`` with its ``config.json``.

    A quantised checkpoint has tensors of its own: what is compared there are the shapes of those that are
    whole, and whether each module has any.  In a model of several parts, whose tensors go by several names,
    it is the shapes.  A model that transformers does not know is not compared, which is logged.

    :raises ModelLoadError: if files are missing or damaged, sizes are none, or tensors do not fit.
    :raises UnsupportedModel: if no architecture is named.
    """
    facts = decoder_facts(path)
    for key in _SIZES:
        if key not in _MAY_LACK or facts.get(key) is not None:
            facts.integer(key)
    names = facts.architectures()
    if not names:
        raise UnsupportedModel(f'{facts.where}: names no architecture; it should, as in ["Qwen3ForCausalLM"]')
    stored = stored_tensors(path)
    model = _without_memory(path, names[0])
    if model is None:
        logger.warning("%s: the tensors of %s are not compared with config.json", path, names[0])
        return
    shapes, unused = _shapes(model), _unused(model)
    quantised = (path / "hf_quant_config.json").is_file() or any(map(facts.get, _QUANTISED))
    if quantised:
        shapes = _comparable(shapes, stored)
    elif facts.get("text_config") is not None:
        shapes = {name: shape for name, shape in shapes.items() if name in stored}
    exact = not quantised and facts.get("text_config") is None
    require_fit(
        path,
        {name: (tensor.file, tensor.shape) for name, tensor in stored.items()},
        shapes,
        ignored=lambda name: not exact or derived(name) or unused(name),
    )


def _without_memory(path: Path, architecture: str) -> Any:
    """The model as transformers has it, on no device; ``None`` if it has no such model."""
    import transformers

    try:
        kind = getattr(transformers, architecture)
        with torch.device("meta"):
            return kind(transformers.AutoConfig.from_pretrained(path))
    except Exception as error:  # whatever the code of some model raises: SGLang may load it all the same
        logger.debug("transformers cannot build %s: %s", architecture, error)
        return None


def _shapes(model: Any) -> dict[str, Shape]:
    """The tensors of a model as they are stored: fused experts, for one, are apart there."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: Mapping[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
    tied = _tied(model)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in tied}


def _tied(model: Any) -> frozenset[str]:
    """Tensors that are others by another name, and need not be stored."""
    tied = model.config.get_text_config().tie_word_embeddings
    return frozenset(model._tied_weights_keys or () if tied else ())


def _unused(model: Any) -> Callable[[str], bool]:
    """Whether a stored tensor is one of those that the model is known to do without."""
    tied = _tied(model)
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return lambda name: name in tied or any(pattern.search(name) for pattern in patterns)


def _comparable(shapes: Mapping[str, Shape], stored: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """Of a quantised model, the tensors that are stored whole, and those of whose module nothing is."""
    modules = {_module(name) for name in stored}
    return {
        name: shape
        for name, shape in shapes.items()
        if (stored[name].dtype in _WHOLE if name in stored else _module(name) not in modules)
    }


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]
