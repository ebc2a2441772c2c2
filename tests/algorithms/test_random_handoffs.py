"""Random sends and take-backs end to end: every side holds what a naive loop over one request says."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.algorithms.held import watched
from tests.algorithms.toys import EOS, toy_recipe
from tests.recipes_python import whims
from tests.recipes_python.whims import NAMES, destination, drops, taken_back
from tests.test_router import Log
from tests.toy.engine import toy_logits
from tokenflow.errors import RouteFailed
from tokenflow.router import Router
from tokenflow.types import Completion
from tokenflow.wire.code import find

pytestmark = pytest.mark.anyio

LENGTH = 20
PROMPTS = [[1, 40, 50, 60 + i] for i in range(5)]
ENDLESS = 16
"""So many times what may be tentative is taken back before it is an error."""


class End(Exception):
    """A response is over: ``stop``, ``length``, or the error that it is."""


@dataclass
class Naive:
    """One request, on its own: its output, who wrote it, how much is final, and what each model was told."""

    prompt: list[int]
    params: dict[str, int]
    rollback: int
    ids: int = 100
    step_end: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    final: int = 0
    told: dict[int, int] = field(default_factory=dict)
    gave_up: set[tuple[int, int]] = field(default_factory=set)
    taken_back: int = 0
    dropped: int = 0
    handoffs: int = 0
    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def run(self) -> str:
        """Write the response; how it ends."""
        here = 1
        try:
            while True:
                here = self.step(here)
        except End as end:
            return str(end)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    def step(self, here: int) -> int:
        """One step at a model; who has the next one."""
        whim, position = self.params["whim"], len(self.output)
        self.steps.append((here, self.tokens))
        token = int(toy_logits(self.tokens, 128, here)[: self.ids].argmax())
        to = destination(whim, here, position, token, self.params["leave"])
        if to in (0, here):
            self.commit(here, token)
            return here
        whole = [*self.tokens, token]
        self.seen.append(("send", here, to, whole, [self.told.get(code) for code in (1, 2, 3)]))
        kept = not drops(whim, here, len(whole), self.params["drop"])
        written = whole if kept else self.tokens
        self.seen.append(self.message(here, to, written))
        if kept:
            self.commit(here, token)
        else:
            self.dropped += 1
            self.bounce(here)
            self.gave_up.add((here, position))
        self.bounce(to)
        self.handoffs += 1
        self.seen.append((to, *self.message(here, to, written)[1:]))
        self.told[here] = self.told[to] = len(written)
        self.receive(to)
        return to

    def message(self, sender: int, to: int, written: Sequence[int]) -> tuple[Any, ...]:
        base = self.told.get(to, 0)
        return sender, list(written[base:]), base, len(written)

    def receive(self, here: int) -> None:
        length = len(self.tokens)
        back = taken_back(self.params["whim"], here, length, self.params["back"])
        kept = max(length - back, len(self.prompt))
        if kept < len(self.prompt) + self.final:
            raise End("final")
        if kept == length:
            return
        self.dropped += length - kept
        self.taken_back += length - kept
        self.cut(kept - len(self.prompt))
        self.bounce(here)
        if self.taken_back > ENDLESS * self.rollback:
            raise End("bounces")

    def bounce(self, code: int) -> None:
        if (code, len(self.output)) in self.gave_up:
            raise End("bounces")

    def cut(self, length: int) -> None:
        del self.output[length:], self.writers[length:]
        self.told = {code: min(told, len(self.tokens)) for code, told in self.told.items()}

    def commit(self, code: int, token: int) -> None:
        self.output.append(token)
        self.writers.append(code)
        end = len(self.output) - self.rollback
        before = self.output[:-1]
        if self.step_end and tuple(before[-len(self.step_end) :]) == self.step_end:
            end = max(end, len(before))
        while self.final < end:
            token = self.output[self.final]
            self.final += 1
            self.gave_up.clear()
            self.taken_back = 0
            if token == EOS or self.final == LENGTH:
                self.cut(self.final)
                raise End("stop" if token == EOS else "length")


STEP_ENDS = {"": (), " ": (5,), '!"': (6, 7)}


@dataclass(frozen=True)
class Made:
    """Parameters of five requests, how much may be taken back, overrides, and the models' options."""

    requests: list[dict[str, int]]
    rollback: int
    ids: int
    step_end: tuple[int, ...]
    overrides: tuple[str, ...]
    options: dict[str, dict[str, Any]]


@st.composite
def whimsical(draw: st.DrawFn) -> Made:
    rollback = draw(st.integers(1, 6))
    text, ids = draw(st.sampled_from([("", 100), ("", 10), (" ", 10), ('!"', 10)]))
    requests = [
        {
            "whim": draw(st.integers(0, 2**20)) * 8 + index,
            "leave": draw(st.integers(1, 6)),
            "drop": draw(st.integers(2, 6)),
            "back": draw(st.integers(0, min(rollback, 3))),
        }
        for index in range(len(PROMPTS))
    ]
    thresholds = ", ".join(f"{name}: {draw(st.integers(1, 3))}" for name in NAMES)
    overrides = [f"rollback={rollback}", f"batching={{policy: fixed, thresholds: {{{thresholds}}}}}"]
    overrides += [f"models.{name}.max_batch_tokens={draw(st.integers(1, 9))}" for name in NAMES]
    narrow = {"kv_capacity": 100, "block_size": draw(st.integers(1, 8))} if draw(st.booleans()) else {}
    overrides += [f"rollback_to={json.dumps(text)}"] if text else []
    options = {name: {"salt": i, "ids": ids, **narrow} for i, name in enumerate(NAMES, 1)}
    return Made(requests, rollback, ids, STEP_ENDS[text], tuple(overrides), options)


async def outcomes(router: Router, requests: Sequence[dict[str, int]]) -> dict[int, Completion | RouteFailed]:
    got: dict[int, Completion | RouteFailed] = {}

    async def ask(index: int) -> None:
        try:
            got[index] = await router.generate(PROMPTS[index], max_tokens=LENGTH, params=requests[index])
        except RouteFailed as error:
            got[index] = error

    async with anyio.create_task_group() as tasks:
        for index in range(len(PROMPTS)):
            tasks.start_soon(ask, index)
    return got


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(whimsical())
async def test_every_side_holds_what_a_naive_loop_says(made: Made) -> None:
    seen: dict[int, list[Any]] = find(whims.__file__, "SEEN")
    seen.clear()
    log = Log()
    with tempfile.TemporaryDirectory() as folder, watched() as held:
        recipe = toy_recipe(Path(folder), whims.whims, made.overrides, **made.options)
        async with Router(recipe, observer=log) as router:
            got = await outcomes(router, made.requests)
            await log.until(lambda: not log.open_handles)
    for index, (prompt, params) in enumerate(zip(PROMPTS, made.requests, strict=True)):
        answer, naive = got[index], Naive(prompt, params, made.rollback, made.ids, made.step_end)
        end = naive.run()
        if isinstance(answer, RouteFailed):
            assert {"final": "are final", "bounces": "would bounce for ever"}[end] in str(answer)
        else:
            assert answer.finish_reason == end
            assert answer.token_ids == naive.output
            assert answer.models == [NAMES[code - 1] for code in naive.writers]
            assert (answer.usage.handoffs, answer.usage.dropped) == (naive.handoffs, naive.dropped)
        # A step that was under way when its request was preempted is made again, and is the same.
        own = [key for key, _ in groupby(h for h in held if h.tokens[: len(prompt)] == prompt)]
        assert [(h.model, h.tokens) for h in own] == naive.steps
        assert seen.get(params["whim"], []) == naive.seen
