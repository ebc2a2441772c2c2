"""A worker that runs no model: it sleeps as long as a step would take and says where requests go."""

from __future__ import annotations

import time
from bisect import bisect
from contextlib import AbstractContextManager, nullcontext

from tokenflow.engines.sim.clock import sleep_until, tighten_timers
from tokenflow.engines.sim.routes import load_routes
from tokenflow.errors import ProtocolError
from tokenflow.random import uniform
from tokenflow.wire.messages import (
    VERSION,
    Hello,
    Open,
    Ready,
    Row,
    RowDone,
    Scored,
    Step,
    StepDone,
    ToWorker,
)

_AWAKE_S = 0.0
"""It does not poll for the next step: that saves 30 us where the core is free, but where the router wants it,
it costs as long as the polling lasts."""
_CONTEXT_LENGTH = 32768
_BLOCK_SIZE = 16
_LETTERS, _FIRST_LETTER = 26, ord("a")
_TOKEN = "token"  # what the random numbers of this module are for


class SimWorker:
    """One simulated model.

    The whole latency passes between a step being known (its frame decoded, if there is one) and its answer
    being sent; what there is to compute and encode is done meanwhile.
    Tokens are random letters of a vocabulary of bytes.

    :raises ModelLoadError: if its trace cannot be used.
    """

    def __init__(self, hello: Hello) -> None:
        self.awake_s = _AWAKE_S
        self.mode: AbstractContextManager[object] = nullcontext()
        self._hello = hello
        self._config = hello.config
        self._routes = load_routes(hello)
        self._residents: dict[int, Open] = {}
        self._lengths: dict[int, int] = {}
        self._busy_until = 0.0
        tighten_timers()

    def ready(self, load_s: float) -> Ready:
        """The handshake's answer: room for every request that may be admitted."""
        context = self._config.context_length or _CONTEXT_LENGTH
        return Ready(
            version=VERSION,
            vocab_size=self._hello.vocab_limit,
            context_length=context,
            kv_capacity=self._config.kv_cache or context * self._config.max_requests,
            block_size=_BLOCK_SIZE,
            max_requests=self._config.max_requests,
            tokenizer="",
            device="simulated",
            dtype="simulated",
            load_s=load_s,
        )

    def close(self) -> None:
        """Nothing is held."""

    def answer(self, message: ToWorker) -> Scored:
        """Nothing but steps can be simulated; :raises ProtocolError: always."""
        raise ProtocolError(f"a simulated model cannot answer {type(message).__name__}")

    def run(self, step: Step) -> StepDone:
        """Run a step; :raises ProtocolError: if it does not fit what is held."""
        started = time.monotonic()
        for handle in step.drop:
            self._residents.pop(handle, None)
            self._lengths.pop(handle, None)
        for opened in step.open:
            self._residents[opened.handle] = opened
            self._lengths[opened.handle] = 0
        for handle, length in step.truncate:
            self._truncate(handle, length)
        rows = [self._row(row) for row in step.rows]
        latency_s = step_ms(self._config.latency_ms, len(rows)) / 1e3 if rows else 0.0
        self._busy_until = started + latency_s
        computed = sum(len(row.tokens) for row in step.rows)
        return StepDone(step.id, rows, [], started, self._busy_until, latency_s, computed, 0)

    def wait(self) -> None:
        """Sleep until the step is over."""
        sleep_until(self._busy_until)

    def _row(self, row: Row) -> RowDone:
        opened = self._residents.get(row.handle)
        if opened is None or opened.epoch != row.epoch or self._lengths[row.handle] != row.base:
            raise ProtocolError(f"row of handle {row.handle} does not continue what this worker holds")
        length = self._lengths[row.handle] = row.base + len(row.tokens)
        position = length - opened.prompt_tokens
        to, last = self._routes.visit(opened, position)
        token = (
            self._hello.eos_token_ids[0]
            if last and self._hello.eos_token_ids
            else self._letter(opened, position)
        )
        if to is None:
            return RowDone(row.handle, row.epoch, length, token)
        return RowDone(row.handle, row.epoch, length, token, to.rule, to.code)

    def _truncate(self, handle: int, length: int) -> None:
        held = self._lengths.get(handle)
        if held is None:
            raise ProtocolError(f"handle {handle} is not open")
        if not 0 <= length <= held:
            raise ProtocolError(f"handle {handle} has {held} tokens and cannot keep {length} of them")
        self._lengths[handle] = length

    def _letter(self, opened: Open, position: int) -> int:
        number = uniform(opened.seed, opened.sampling.choice, position, self._hello.code, _TOKEN)
        return (_FIRST_LETTER + int(number * _LETTERS)) % self._hello.vocab_limit


def step_ms(table: tuple[tuple[int, float], ...], batch: int) -> float:
    """Latency of a step: linear between the entries of a table by batch size, constant beyond them."""
    at = bisect(table, batch, key=lambda entry: entry[0])
    if at == 0 or at == len(table):
        return table[max(at - 1, 0)][1]
    (low, before), (high, after) = table[at - 1], table[at]
    return before + (after - before) * (batch - low) / (high - low)
