"""tokenflow, with recipes that replay traces (:mod:`bench.compare.replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare.load import Emit
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.router import Router
from tokenflow.wire.messages import Step, StepDone

MOST_REQUESTS = 16


class Tokenflow:
    """See :class:`bench.compare.serve.Server`; its notes are :class:`bench.compare.bound.Step`.

    ``settings`` are further overrides of the recipe.
    """

    at_a_time = 0
    engine = "torch"

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self._router: Router | None = None
        self._steps: list[tuple[int, int, int, float, float, int]] = []

    async def open(self, paths: Sequence[Path], dtype: str) -> None:
        self._router = await Router(self.recipe(paths, dtype), observer=self._note).__aenter__()

    def recipe(self, paths: Sequence[Path], dtype: str) -> RecipeIR:
        """The recipe that replays traces over these models."""
        if len(paths) == 1:
            model = {"path": str(paths[0]), "dtype": dtype, "engine": self.engine}
            return load_recipe(
                {"name": "alone", "entry": "m0", "params": {"request": 0.0}, "models": {"m0": model}}
            )
        from bench.compare import replay

        overrides = [
            f"models.m{index}.{key}={value}"
            for index, path in enumerate(paths)
            for key, value in (
                ("path", path),
                ("dtype", dtype),
                ("engine", self.engine),
                ("max_requests", MOST_REQUESTS),
            )
        ]
        overrides += [f"{key}={value}" for key, value in self.settings.items()]
        return (replay.pair if len(paths) == 2 else replay.trio).compile(overrides=overrides)

    async def generate(self, index: int, prompt: list[int], trace: str, variant: str, emit: Emit) -> None:
        assert self._router is not None
        count = sum(letter.isupper() for letter in trace)
        async with self._router.stream(
            prompt, params={"request": index}, max_tokens=count, ignore_eos=True, temperature=0.0
        ) as response:
            async for event in response:
                for token in event.tokens:
                    emit(token.id, int(token.model.removeprefix("m")))

    def _note(self, model: str, step: Step, done: StepDone) -> None:
        if step.rows:
            context = sum(row.position for row in done.rows)
            code = int(model.removeprefix("m"))
            step_s = done.ended - done.started
            self._steps.append((code, done.computed, context, done.forward_s, step_s, len(step.rows)))

    def drain(self) -> dict[str, Any]:
        steps, self._steps = self._steps, []
        return {"steps": steps}

    async def close(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            await router.__aexit__(None, None, None)


class TokenflowOnSglang(Tokenflow):
    """The same on SGLang's engine."""

    engine = "sglang"
