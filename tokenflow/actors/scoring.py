"""Log-probabilities of texts that nobody has to write: prompts that are scored."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict

from tokenflow.actors.model import ModelActor
from tokenflow.errors import DeadlyRequest, EngineError, NonFiniteLogits, WorkerDied
from tokenflow.wire.messages import Score, Scored

_DEADLY = 2


class Scoring:
    """Asks workers for scores, one at a time each, so that the steps of responses come in between."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def score(self, actor: ModelActor, tokens: list[int], top: int) -> Scored:
        """Log-probabilities of ``tokens[1:]`` by a model, with the ``top`` best at each position.

        :raises EngineError: if the engine could not score them.
        :raises NonFiniteLogits: if it computed NaN.
        :raises DeadlyRequest: if two workers died of the prompt.
        :raises WorkerDied: if the model is given up.
        :raises RouterClosed: if the router is stopped.
        """
        name = actor.model.name
        async with self._turns[name]:
            scored = await self._ask(actor, tokens, top)
        if scored.failure:
            raise EngineError(f"model {name!r} could not score the prompt: {scored.failure}")
        if any(map(math.isnan, scored.logprobs)):
            raise NonFiniteLogits(f"model {name!r} gave NaN logits for a prompt; check its weights and dtype")
        return scored

    async def _ask(self, actor: ModelActor, tokens: list[int], top: int) -> Scored:
        """A replacement is asked again; a prompt that has killed several is not tried any more."""
        deaths = 0
        while True:
            worker = await actor.supervisor.ready()
            try:
                scored = await worker.score(Score(next(self._ids), tokens, top))
            except WorkerDied as error:
                deaths += 1
                if deaths == _DEADLY and actor.supervisor.error is None:
                    died = f"two workers of model {actor.model.name!r} died while they scored this prompt"
                    raise DeadlyRequest(f"{died}; the last: {error}") from None
            else:
                if scored is not None:
                    return scored
