"""An engine that fails as it is told to, around any other engine.

``chaos.json`` in the model directory holds ``engine``, the one that does the work (as in a recipe, the toy
engine by default), and ``lives``: the faults of the model's first worker, of its second, and so on; those
that come after the last are healthy.  A life may hold

``die_loading``  an exit code          ``fail_loading``  a message
``die_at``       a step: exit code 9   ``kill_at``       a step: SIGKILL
``hang_at``      a step: never ends    ``stop_at``       a step: SIGSTOP
``raise_at``     a step: EngineError   ``oom_at``        a step: out of memory
``no_memory_at`` a step: MemoryError   ``garbage_at``    a step: its answer is no message
``nan_at``       a step: NaN logits
``stray_at``     a step: its answer is about somebody else
``slow_s``       seconds that every step takes longer
``poison``       a token id: a step that feeds it ends the process
``nan_token``    a token id: logits of requests that have it are NaN
``hang_loading`` true: loading never ends   ``die_scoring`` true: it dies of the first prompt to score
``stop_loading`` true: SIGSTOP               ``hang_scoring`` true: that never ends

Steps count from 1 in each life.  ``books`` in the same directory is written after every change: how many
slots are open, and how many tokens they hold; ``blocks`` is how many blocks of memory Python had allocated
some steps ago.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.recipes import ENGINE as TOY
from tokenflow.engines.base import Engine, EngineInfo, Extend, Opened, Scores, StepOutput
from tokenflow.engines.load import load_engine
from tokenflow.errors import EngineError, ModelLoadError
from tokenflow.types import ModelConfig
from tokenflow.wire.channel import encode
from tokenflow.wire.messages import StepDone
from tokenflow.worker import loop

_BLOCKS_EVERY = 50
ENGINE = f"{Path(__file__)}:ChaosEngine"


class ChaosEngine:
    """See the module."""

    def __init__(self, config: ModelConfig) -> None:
        self._folder = Path(config.path)
        plan: dict[str, Any] = json.loads((self._folder / "chaos.json").read_text())
        self._life = _next_life(self._folder, plan.get("lives", []))
        self._steps = 0
        self._held: dict[int, int] = {}
        self._nan: set[int] = set()
        if "die_loading" in self._life:
            os.write(2, b"chaos: dies while loading\n")
            os._exit(self._life["die_loading"])
        if "fail_loading" in self._life:
            raise ModelLoadError(self._life["fail_loading"])
        if "stop_loading" in self._life:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "hang_loading" in self._life:
            _hang()
        self._engine: Engine = load_engine(replace(config, engine=plan.get("engine", TOY)))
        self._write_books()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def embeddings(self) -> torch.Tensor:
        return self._engine.embeddings

    def open(self, tokens: Sequence[int]) -> Opened:
        opened = self._engine.open(tokens)
        self._keep_books(opened.slot)
        return opened

    def step(self, extends: Sequence[Extend]) -> StepOutput:
        self._steps += 1
        time.sleep(self._life.get("slow_s", 0.0))
        for fault, act in FAULTS.items():
            if self._life.get(fault) == self._steps:
                act()
        if any(self._life.get("poison") in extend.tokens for extend in extends):
            os.write(2, b"chaos: poisoned\n")
            os._exit(9)
        output = self._engine.step(extends)
        for extend in extends:
            self._held[extend.slot] = self._engine.length(extend.slot)
        self._write_books()
        if self._steps % _BLOCKS_EVERY == 0:
            # Free lists, of up to 2,000 tuples of each length, are emptied by a collection only.
            gc.collect()
            self._write("blocks", sys.getallocatedblocks())
        output = self._spoil(extends, output)
        if self._life.get("nan_at") == self._steps:
            return StepOutput(torch.full_like(output.logits, torch.nan), output.hidden)
        return output

    def _spoil(self, extends: Sequence[Extend], output: StepOutput) -> StepOutput:
        """NaN for whatever a request with the token for it wants."""
        self._nan |= {extend.slot for extend in extends if self._life.get("nan_token") in extend.tokens}
        if not self._nan:
            return output
        wanted = {"none": 0, "last": 1}
        bad = [
            extend.slot in self._nan
            for extend in extends
            for _ in range(wanted.get(extend.logits, len(extend.tokens)))
        ]
        return StepOutput(output.logits.masked_fill(torch.tensor(bad)[:, None], torch.nan), output.hidden)

    def length(self, slot: int) -> int:
        return self._engine.length(slot)

    def truncate(self, slot: int, length: int) -> None:
        self._engine.truncate(slot, length)
        self._keep_books(slot)

    def release(self, slot: int) -> None:
        self._engine.release(slot)
        del self._held[slot]
        self._nan.discard(slot)
        self._write_books()

    def score(self, tokens: Sequence[int], top: int = 0) -> Scores:
        if "die_scoring" in self._life:
            _die()
        if "hang_scoring" in self._life:
            _hang()
        return self._engine.score(tokens, top)

    def close(self) -> None:
        self._engine.close()

    def _keep_books(self, slot: int) -> None:
        self._held[slot] = self._engine.length(slot)
        self._write_books()

    def _write_books(self) -> None:
        self._write("books", {"open": len(self._held), "tokens": sum(self._held.values())})

    def _write(self, name: str, what: object) -> None:
        """As a whole: whoever reads gets the last or this one."""
        whole = self._folder / f"{name}.new"
        whole.write_text(json.dumps(what))
        whole.rename(self._folder / name)


def _next_life(folder: Path, lives: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Count the workers of a model: one byte in a file for each."""
    with (folder / "lives").open("ab") as file:
        file.write(b".")
        number = file.tell() - 1
    return lives[number] if number < len(lives) else {}


def _die() -> None:
    os.write(2, b"chaos: dies\n")
    os._exit(9)


def _hang() -> None:
    while True:
        time.sleep(60)


def _fail() -> None:
    raise EngineError("chaos: raises")


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("chaos: tried to allocate 1 GiB")


def _run_out_of_all_memory() -> None:
    raise MemoryError("chaos: not a byte is left")


def _send_garbage() -> None:
    """The next answer is no message."""
    loop.encode = lambda message: b"\xff\xff\xff\xff"  # type: ignore[attr-defined]


def _send_stray() -> None:
    """The next answer is about requests that were not asked for."""

    def lie(done: StepDone) -> bytes:
        rows = [msgspec.structs.replace(row, handle=row.handle + 1000) for row in done.rows]
        return encode(msgspec.structs.replace(done, rows=rows))

    loop.encode = lie  # type: ignore[attr-defined, assignment]


FAULTS = {
    "die_at": _die,
    "kill_at": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang_at": _hang,
    "stop_at": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise_at": _fail,
    "oom_at": _run_out_of_memory,
    "no_memory_at": _run_out_of_all_memory,
    "garbage_at": _send_garbage,
    "stray_at": _send_stray,
}
