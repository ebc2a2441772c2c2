"""Log-probabilities of texts that nobody has to write: prompts that are scored."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict

from tokenflow.actors.model import ModelActor
from tokenflow.errors import DeadlyRequest, EngineError, NonFiniteLogits, WorkerDied
from tokenflow.wire.messages import Score, Scored


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
        """
        name = actor.model.name
        async with self._turns[name]:
            try:
                scored = await self._ask(actor, tokens, top)
            except WorkerDied:
                scored = await self._ask_again(actor, tokens, top)
        if scored.failure:
            raise EngineError(f"model {name!r} could not score the prompt: {scored.failure}")
        if any(map(math.isnan, scored.logprobs)):
            raise NonFiniteLogits(f"model {name!r} gave NaN logits for a prompt; check its weights and dtype")
        return scored

    async def _ask_again(self, actor: ModelActor, tokens: list[int], top: int) -> Scored:
        """The replacement is asked; a prompt that kills a second worker is not tried again."""
        try:
            return await self._ask(actor, tokens, top)
        except WorkerDied as error:
            if actor.supervisor.error is not None:
                raise
            died = f"two workers of model {actor.model.name!r} died while they scored this prompt"
            raise DeadlyRequest(f"{died}; the last: {error}") from None

    async def _ask(self, actor: ModelActor, tokens: list[int], top: int) -> Scored:
        worker = await actor.supervisor.ready()
        return await worker.score(Score(next(self._ids), tokens, top))
