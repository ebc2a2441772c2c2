"""An engine that copies: what it writes is what stands between its prompt's first token and a marker.

Prompts are ``start, ids..., marker``; the answer is ``ids..., end`` whichever model writes which of them.
"""

from __future__ import annotations

import torch

from tests.toy.engine import ToyEngine

END = 2


class EchoEngine(ToyEngine):
    """See the module; ``toy.json`` holds the ``marker``."""

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        marker = tokens.index(self._options["marker"])
        written = len(tokens) - marker - 1
        logits = torch.zeros(self.info.vocab_size)
        logits[tokens[1 + written] if 1 + written < marker else END] = 9.0
        return logits
