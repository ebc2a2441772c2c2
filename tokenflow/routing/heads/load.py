"""Router heads by the name of their format."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokenflow.errors import ModelLoadError
from tokenflow.routing.heads.base import Head
from tokenflow.routing.heads.citer import load_citer
from tokenflow.routing.heads.co_llm import load_co_llm
from tokenflow.routing.heads.r2r import load_r2r

KINDS = ("r2r", "citer", "co_llm")


def load_head(
    kind: str,
    path: Path,
    *,
    embeddings: Tensor,
    hidden_size: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> Head:
    """Load the router head of one model.

    :param kind: the format, one of :data:`KINDS`.
    :param path: the file or its directory; for ``co_llm`` the model's own directory.
    :param embeddings: the model's input embeddings [V, E].
    :param hidden_size: H, the width of the model's hidden states.
    :param dtype: what the head computes in; its scores are float32 all the same.
    :raises ModelNotFound: if there is no such file.
    :raises ModelLoadError: if the head cannot be read, is not of this kind, or was made for another model.
    """
    device = torch.device(device)
    match kind:
        case "r2r":
            return load_r2r(path, embeddings=embeddings, hidden_size=hidden_size, device=device, dtype=dtype)
        case "citer":
            return load_citer(path, hidden_size=hidden_size, device=device, dtype=dtype)
        case "co_llm":
            return load_co_llm(path, vocab_size=len(embeddings))
    raise ModelLoadError(f"router head kind {kind!r} does not exist; kinds: {', '.join(KINDS)}")
