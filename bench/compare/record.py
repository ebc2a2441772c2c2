"""Record the routes that the five algorithms take on the demo models: ``python -m bench.compare.record``.

Each recipe answers the same evaluation questions, one at a time, greedily (ME draws, as it is defined).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.compare import traces
from tokenflow.router import Router
from tokenflow.wire.messages import Step, StepDone

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
RECIPES = {
    "r-stitch": DEMO.parent / "demo.yaml",
    "r2r": DEMO / "r2r.yaml",
    "citer": DEMO / "citer.yaml",
    "co-llm": DEMO / "co_llm.yaml",
    "me": DEMO / "me.yaml",
}
EVERY = 20
"""Every so many of the 1,000 questions is asked."""


class Samples:
    """Notes where each request sampled a token: (model's letter, position in the sequence)."""

    def __init__(self, models: Sequence[str]) -> None:
        self._letters = dict(zip(models, "abc", strict=False))
        self.of: dict[int, list[tuple[str, int]]] = {}

    def __call__(self, model: str, step: Step, done: StepDone) -> None:
        for row in done.rows:
            if row.token >= 0:
                self.of.setdefault(row.handle, []).append((self._letters[model], row.position))


def trace_of(samples: Sequence[tuple[str, int]]) -> str:
    """A token was kept if and only if nobody sampled its position again."""
    following = [position for _, position in samples[1:]] + [-1]
    return "".join(
        letter if position == after else letter.upper()
        for (letter, position), after in zip(samples, following, strict=True)
    )


async def record(recipe: Path, prompts: Sequence[str], temperature: float) -> list[str]:
    """One trace per prompt."""
    router = Router(recipe)
    samples = Samples([model.name for model in router.recipe.models])
    async with Router(router.recipe, observer=samples) as running:
        for seed, prompt in enumerate(prompts):
            answer = await running.generate(prompt, max_tokens=400, temperature=temperature, seed=seed)
            trace = trace_of(samples.of[max(samples.of)])
            letters = {model.name: index for index, model in enumerate(router.recipe.models)}
            assert traces.writers(trace) == [letters[model] for model in answer.models]
    return [trace_of(samples.of[handle]) for handle in sorted(samples.of)]


async def record_all() -> dict[str, list[str]]:
    """Traces of every algorithm."""
    rows = [json.loads(line) for line in (DEMO / "eval.jsonl").open(encoding="utf-8")]
    prompts = [row["prompt"] for row in rows[::EVERY]]
    return {name: await record(recipe, prompts, float(name == "me")) for name, recipe in RECIPES.items()}


def main() -> None:
    """Record, save, and say what was recorded."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        recorded = runner.run(record_all())
    traces.save(recorded)
    for name, listed in recorded.items():
        written = [model for trace in listed for model in traces.writers(trace)]
        visits = [visit for trace in listed for visit in traces.runs(trace)]
        shares = ", ".join(f"{written.count(model) / len(written):.1%}" for model in range(max(written) + 1))
        print(
            f"{name}: {len(listed)} responses, {len(written)} tokens ({shares} by model), "
            f"{len(visits) / len(written):.2f} visits per token"
        )


if __name__ == "__main__":
    main()
