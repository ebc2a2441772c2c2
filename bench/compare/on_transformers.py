"""The way of the algorithms' own repositories: a loop over transformers models, one request at a time.

Each model keeps a cache of its own for the request; at its turn it reads what was written meanwhile in one
forward pass and writes the next token.  Those repositories have no prefix cache.  This has one of whole
prompts, so that decoding can be measured apart from reading them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from bench.compare import traces
from bench.compare.load import Emit

_PROMPTS = 16
_OLDER = "past_key_values"
"""What versions before 5.24 call a model's cache."""


class Official:
    """See :class:`bench.compare.serve.Server`."""

    at_a_time = 1

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._models: list[PreTrainedModel] = []
        self._turn = asyncio.Lock()
        self._cache = _OLDER
        self._read: dict[tuple[int, ...], list[DynamicCache]] = {}

    async def open(self, paths: Sequence[Path], dtype: str) -> None:
        self._models = [
            AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval() for path in paths
        ]
        named = "cache" in inspect.signature(self._models[0].forward).parameters
        self._cache = "cache" if named else _OLDER

    async def generate(self, index: int, prompt: list[int], trace: str, variant: str, emit: Emit) -> None:
        async with self._turn:
            tokens = list(prompt)
            caches = self._caches(prompt)
            try:
                for letter in trace:
                    model = traces.model_of(letter)
                    token = self._next(model, caches[model], tokens)
                    if letter.isupper():
                        tokens.append(token)
                        emit(token, model)
                    await asyncio.sleep(0)
            finally:
                self._keep(prompt, caches)

    def _caches(self, prompt: list[int]) -> list[DynamicCache]:
        """A cache for each model, with all of the prompt but its last token if that was read before."""
        known = self._read.pop(tuple(prompt[:-1]), None)
        if known is None:
            return [DynamicCache(config=model.config) for model in self._models]
        for cache in known:
            if (beyond := cache.get_seq_length() - len(prompt) + 1) > 0:
                cache.crop(-beyond)
        return known

    def _keep(self, prompt: list[int], caches: list[DynamicCache]) -> None:
        self._read[tuple(prompt[:-1])] = caches
        while len(self._read) > _PROMPTS:
            del self._read[next(iter(self._read))]

    @torch.inference_mode()
    def _next(self, model: int, cache: DynamicCache, tokens: list[int]) -> int:
        """The model's greedy choice, once it has read what its cache does not hold."""
        unread = torch.tensor([tokens[cache.get_seq_length() :]])
        output = self._models[model](unread, use_cache=True, logits_to_keep=1, **{self._cache: cache})
        return int(output.logits[0, -1].argmax())

    def drain(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        self._models = []
