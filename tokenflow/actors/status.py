"""What an actor system is doing, read from its counters and books: no worker is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tokenflow.actors.ledger import Ledger
from tokenflow.actors.model import ModelActor
from tokenflow.actors.sequence import Sequence
from tokenflow.types import ModelStatus


def model_statuses(
    actors: Mapping[int, ModelActor], ledger: Ledger, active: Iterable[Sequence]
) -> tuple[ModelStatus, ...]:
    """The status of every model, in recipe order.

    :param actors: by model code.
    :param active: all requests that are admitted and not over.
    """
    pending = Counter(
        code
        for sequence in active
        for code, actor in actors.items()
        if code != sequence.holder and actor.holds(sequence)
    )
    return tuple(
        ModelStatus(
            name=actor.model.name,
            condition=actor.supervisor.condition.value,
            restarts=actor.supervisor.restarts,
            threshold=actor.threshold,
            waiting=actor.waiting,
            pending=pending[code],
            kv_used=used,
            kv_capacity=capacity,
            steps=actor.counters.steps,
            committed_tokens=actor.counters.committed_tokens,
            computed_tokens=actor.counters.computed_tokens,
            cached_tokens=actor.counters.cached_tokens,
            forward_s=actor.counters.forward_s,
            step_s=actor.counters.step_s,
        )
        for (code, actor), (used, capacity) in zip(actors.items(), ledger.use(), strict=True)
    )
