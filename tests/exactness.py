"""Routed answers compared with recorded reference traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio

from tests.reference.record import Recorded
from tests.reference.reference import Trace, difference
from tokenflow.router import Router
from tokenflow.types import Completion


async def answers(
    router: Router, prompts: Sequence[list[int]], concurrency: int, **request: object
) -> list[Completion]:
    """The answer to every prompt; the seed of a request is the index of its prompt."""
    done: dict[int, Completion] = {}
    todo = iter(enumerate(prompts))

    async def work() -> None:
        for index, prompt in todo:
            done[index] = await router.generate(prompt, seed=index, **request)

    async with anyio.create_task_group() as tasks:
        for _ in range(concurrency):
            tasks.start_soon(work)
    return [done[index] for index in range(len(done))]


async def unexcused(
    router: Router,
    recorded: Recorded,
    case: str,
    concurrency: int,
    count: int,
    params: Mapping[str, float] | None = None,
    temperature: float = 0.0,
) -> list[str]:
    """Differences to the reference that no near-tie explains; those that one does are printed."""
    completions = await answers(
        router,
        recorded.prompts[:count],
        concurrency,
        max_tokens=recorded.max_tokens,
        temperature=temperature,
        params=params or {},
    )
    assert len(completions) == count
    traces = [recorded.traces[case, index] for index in range(count)]
    wrong = []
    for index, (trace, answer) in enumerate(zip(traces, completions, strict=True)):
        fault = judge(trace, answer)
        if fault is not None:
            wrong.append(f"{case}, prompt {index}: {fault}")
    return wrong


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
