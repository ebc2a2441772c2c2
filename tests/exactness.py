"""Routed answers compared with recorded reference traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import anyio

from tests.reference.record import Recorded
from tests.reference.reference import Trace, difference
from tokenflow.router import Router
from tokenflow.types import Completion


async def answers(
    router: Router, prompts: Mapping[int, list[int]], concurrency: int, **request: Any
) -> dict[int, Completion]:
    """The answers to prompts by index, which is the seed of each request."""
    done: dict[int, Completion] = {}
    todo = iter(prompts.items())

    async def work() -> None:
        for index, prompt in todo:
            done[index] = await router.generate(prompt, seed=index, **request)

    async with anyio.create_task_group() as tasks:
        for _ in range(concurrency):
            tasks.start_soon(work)
    return done


async def unexcused(
    router: Router,
    recorded: Recorded,
    case: str,
    concurrency: int,
    prompts: Iterable[int],
    params: Mapping[str, float] | None = None,
    temperature: float = 0.0,
) -> list[str]:
    """Differences to the reference that no near-tie explains; those that one does are printed.

    :param prompts: indices of recorded prompts.
    """
    completions = await answers(
        router,
        {index: recorded.prompts[index] for index in prompts},
        concurrency,
        max_tokens=recorded.max_tokens,
        temperature=temperature,
        params=params or {},
    )
    traces = {index: recorded.traces[case, index] for index in completions}
    faults = {index: judge(traces[index], answer) for index, answer in completions.items()}
    assert faults
    same = sum(
        difference(trace, completions[index].token_ids, completions[index].models) is None
        for index, trace in traces.items()
    )
    print(f"{case}, {concurrency} at once: {same} of {len(faults)} texts and traces are the reference's")
    return [f"{case}, prompt {index}: {fault}" for index, fault in faults.items() if fault is not None]


def judge(trace: Trace, answer: Completion) -> str | None:
    """What is wrong with an answer; None if it is the reference's, or a near-tie explains the difference."""
    found = difference(trace, answer.token_ids, answer.models)
    if found is None:
        expected = (trace.finish_reason, trace.handoffs, trace.dropped)
        got = (answer.finish_reason, answer.usage.handoffs, answer.usage.dropped)
        return None if got == expected else f"end, hand-offs and drops are {got} instead of {expected}"
    if found.excuse is None:
        return found.text
    print(f"{found.text}, excused by {found.excuse}")
    return None
