"""A short run of a recipe that measures where its models lead and how long their steps take."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import anyio

from tokenflow.dsl.ir import RecipeIR
from tokenflow.errors import InvalidRequest
from tokenflow.eventloop import new_event_loop
from tokenflow.planner import RoutingModel
from tokenflow.prompts import Prompt
from tokenflow.router import Router
from tokenflow.rows import open_rows, parse_row, prompt_of

_PROMPTS = (
    "What is 17 times 23? Explain step by step.",
    "Write a short story about a lighthouse keeper.",
    "Summarise the causes of the French Revolution.",
    "Write a Python function that merges two sorted lists.",
    "Explain photosynthesis to a child.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take?",
    "Translate to French: the weather is nice today.",
    "List five ways to save energy at home.",
)


def measure(recipe: RecipeIR, concurrency: int, seconds: int, source: str | None) -> RoutingModel:
    """Run the recipe with eager batches for so long, and say what was measured.

    :param concurrency: requests at a time; a third of the time each it is 1, about its root, and all of it,
        so that latencies are known at small and large batches.
    :param source: a file of prompts; None takes a few of our own.
    :raises InvalidRequest: if the file has a row without a prompt.
    :raises PlanError: if too few steps were run to tell.
    """
    prompts = list(_PROMPTS) if source is None else _read(source)
    eager = replace(recipe, batching=replace(recipe.batching, policy="eager", thresholds={}))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_measure(eager, concurrency, seconds, prompts))


async def _measure(
    recipe: RecipeIR, concurrency: int, seconds: int, prompts: Sequence[Prompt]
) -> RoutingModel:
    levels = sorted({1, math.isqrt(concurrency), concurrency})
    numbers = itertools.count()

    async def ask(router: Router) -> None:
        for number in numbers:
            await router.generate(prompts[number % len(prompts)], seed=number)

    print(f"{recipe.name}: loading, then measuring for {seconds} s", file=sys.stderr)
    async with Router(recipe) as router:
        for level in levels:
            try:
                with anyio.move_on_after(seconds / len(levels)):
                    async with anyio.create_task_group() as tasks:
                        for _ in range(level):
                            tasks.start_soon(ask, router)
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
        return router.routing_model()


def _read(path: str) -> list[Prompt]:
    with open_rows(path) as lines:
        prompts = [prompt_of(parse_row(line, number)) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompt", "input")
    return prompts
