"""Routed answers compared with recorded reference traces."""

from __future__ import annotations

from tests.reference.record import Recorded
from tests.reference.reference import difference
from tokenflow.router import Router


async def unexcused(
    router: Router, recorded: Recorded, tau: float, concurrency: int, count: int
) -> list[str]:
    """Differences to the reference that no near-tie explains; those that one does are printed."""
    answers = await router.generate_many(
        recorded.prompts[:count],
        concurrency=concurrency,
        max_tokens=recorded.max_tokens,
        params={"tau": tau},
    )
    assert len(answers) == count
    wrong = []
    for index, answer in enumerate(answers):
        trace = recorded.traces[tau, index]
        found = difference(trace, answer.token_ids, answer.models)
        if found is not None and found.excuse is not None:
            print(f"tau {tau}, prompt {index}: {found.text}, excused by {found.excuse}")
        elif found is not None:
            wrong.append(f"tau {tau}, prompt {index}: {found.text}")
        else:
            assert answer.finish_reason == trace.finish_reason
            assert answer.usage.handoffs == trace.handoffs
            assert answer.usage.dropped == trace.dropped
    return wrong
