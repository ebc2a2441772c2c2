"""A toy engine: logits are a pure function of the token ids, and trouble comes as a file says.

``toy.json`` in the model directory may hold: ``vocab_size`` (default: as the demo's 128), ``salt``
(another salt, another model), ``ids`` (only ids below have a probability), ``context_length``,
``kv_capacity``, ``max_requests``, ``block_size``, ``step_s`` (sleep per step), ``nan_first`` (a token id:
logits of sequences that begin with it are NaN), ``die_at_step`` (with exit code 9), ``raise_at_step``,
``fail_load`` (a message), ``die_loading`` (an exit code). With ``script`` the logits are written down
instead, for prompts of one token: a row for each number of output tokens so far, of which the last stands for
all that follow. A row is ``[token, height]``, one logit of that height above zeros, or the logits of the
first ids, -inf for all others.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokenflow.engines.base import EngineInfo, Extend, Opened, Scores, StepOutput
from tokenflow.errors import EngineError, ModelLoadError
from tokenflow.types import ModelConfig

HIDDEN = 4


class ToyEngine:
    """See the module."""

    def __init__(self, config: ModelConfig) -> None:
        script = Path(config.path) / "toy.json"
        options: dict[str, Any] = json.loads(script.read_text()) if script.exists() else {}
        if "die_loading" in options:
            os.write(2, b"the toy engine dies while loading\n")
            os._exit(options["die_loading"])
        if "fail_load" in options:
            raise ModelLoadError(options["fail_load"])
        self._options = options
        self._steps = 0
        self._slots: dict[int, list[int]] = {}
        self._next = 0
        self.info = EngineInfo(
            vocab_size=options.get("vocab_size", 128),
            hidden_size=HIDDEN,
            context_length=config.context_length or options.get("context_length", 1024),
            kv_capacity=config.kv_cache or options.get("kv_capacity", 65536),
            block_size=options.get("block_size", 1),
            max_requests=min(config.max_requests, options.get("max_requests", 64)),
            eos_token_ids=(2,),
            device="cpu",
            dtype="float32",
        )

    @property
    def embeddings(self) -> torch.Tensor:
        return torch.zeros(self.info.vocab_size, HIDDEN)

    def open(self, tokens: Sequence[int]) -> Opened:
        if len(self._slots) >= self.info.max_requests:
            raise EngineError("every slot is taken")
        self._next += 1
        self._slots[self._next] = []
        return Opened(self._next, 0)

    def step(self, extends: Sequence[Extend]) -> StepOutput:
        self._steps += 1
        if self._steps == self._options.get("die_at_step"):
            os.write(2, b"the toy engine dies\n")
            os._exit(9)
        if self._steps == self._options.get("raise_at_step"):
            raise EngineError("the toy engine raises")
        time.sleep(self._options.get("step_s", 0.0))
        rows = []
        for extend in extends:
            tokens = self._slots[extend.slot]
            tokens.extend(extend.tokens)
            wanted = {"none": 0, "last": 1, "all": len(extend.tokens)}[extend.logits]
            rows += [self._logits(tokens[: len(tokens) - back]) for back in reversed(range(wanted))]
        held = sum(-(-len(t) // self.info.block_size) * self.info.block_size for t in self._slots.values())
        if held > self.info.kv_capacity:
            raise EngineError(f"{held} tokens exceed the KV cache of {self.info.kv_capacity}")
        logits = torch.stack(rows) if rows else torch.empty(0, self.info.vocab_size)
        return StepOutput(logits, torch.zeros(len(rows), HIDDEN))

    def length(self, slot: int) -> int:
        return len(self._slots[slot])

    def truncate(self, slot: int, length: int) -> None:
        del self._slots[slot][length:]

    def release(self, slot: int) -> None:
        del self._slots[slot]

    def score(self, tokens: Sequence[int], top: int = 0) -> Scores:
        raise EngineError("the toy engine does not score")

    def close(self) -> None:
        self._slots.clear()

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        if self._options.get("nan_first") == tokens[0]:
            return torch.full((self.info.vocab_size,), math.nan)
        if script := self._options.get("script"):
            return scripted_logits(script[min(len(tokens), len(script)) - 1], self.info.vocab_size)
        logits = toy_logits(tokens, self.info.vocab_size, self._options.get("salt", 0))
        logits[self._options.get("ids", len(logits)) :] = -math.inf
        return logits


def scripted_logits(row: Sequence[float], vocab_size: int) -> torch.Tensor:
    """The logits [V] of a row of a script."""
    if len(row) == 2:
        token, height = row
        logits = torch.zeros(vocab_size)
        logits[int(token)] = height
        return logits
    logits = torch.full((vocab_size,), -math.inf)
    logits[: len(row)] = torch.tensor(row)
    return logits


def toy_logits(tokens: Sequence[int], vocab_size: int, salt: int = 0) -> torch.Tensor:
    """Pseudo-random logits: a function of the salt, the last eight ids and the length."""
    seed = salt * 7919 + len(tokens)
    for token in tokens[-8:]:
        seed = (seed * 1_000_003 + token + 1) % 2**62
    return 4 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
