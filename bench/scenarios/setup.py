"""The demo pair in the chaos engine, questions with their undisturbed answers, and a load that compares."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.chaos import ENGINE
from tokenflow.actors.supervisor import Supervisor
from tokenflow.dsl.ir import OnFailure, RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.router import Router
from tokenflow.types import Completion
from tokenflow.wire.messages import Step, StepDone

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes" / "demo"
RECIPE = ROOT / "recipes" / "demo.yaml"
AUTO = "batching={policy: auto}"
"""Batches start as by default, not at once as in the demo."""
MODELS = {"slm": "small", "llm": "large"}
TOKENS = 160


class Broken(Exception):
    """Something is not as promised."""


def require(ok: object, what: str) -> None:
    if not ok:
        raise Broken(what)


class Question(NamedTuple):
    """A prompt with its sampling: every other one is seeded."""

    prompt: str
    sampling: dict[str, Any]


class Answer(NamedTuple):
    """What must not change."""

    tokens: list[int]
    models: list[str]
    text: str


def answer_of(completion: Completion) -> Answer:
    return Answer(completion.token_ids, completion.models, completion.text)


def questions(count: int, seed: int) -> list[Question]:
    rows = [json.loads(line) for line in (DEMO / "eval.jsonl").open(encoding="utf-8")]
    chosen = random.Random(seed).sample(rows, count)
    seeded = {"temperature": 0.8, "top_p": 0.95}
    return [
        Question(row["prompt"], {"max_tokens": TOKENS, **({**seeded, "seed": index} if index % 2 else {})})
        for index, row in enumerate(chosen)
    ]


def demo(
    folder: Path,
    lives: dict[str, list[dict[str, Any]]] | None = None,
    *,
    source: Path = RECIPE,
    on_failure: OnFailure = "fail",
    **config: Any,
) -> RecipeIR:
    """A recipe over the demo pair, with these faults (:mod:`tests.faults.chaos`).

    :param source: the recipe; its models are ``slm`` and ``llm``.
    :param config: set for both models.
    """
    models = []
    recipe = load_recipe(source, [AUTO] if source.suffix == ".yaml" else [])
    for model in recipe.models:
        path = folder / model.name
        path.mkdir()
        for file in (DEMO / MODELS[model.name]).iterdir():
            (path / file.name).symlink_to(file)
        plan = {"engine": "torch", "lives": (lives or {}).get(model.name, [])}
        (path / "chaos.json").write_text(json.dumps(plan))
        models.append(replace(model, config=replace(model.config, path=str(path), engine=ENGINE, **config)))
    return replace(recipe, models=tuple(models), on_failure=on_failure)


def books(recipe: RecipeIR) -> dict[str, dict[str, int]]:
    """What each engine holds."""
    return {
        model.name: json.loads((Path(model.config.path) / "books").read_text()) for model in recipe.models
    }


class Steps:
    """Says when a model next completes a step."""

    def __init__(self) -> None:
        self._next: dict[str, asyncio.Future[float]] = {}

    def __call__(self, model: str, step: Step, done: StepDone) -> None:
        waiting = self._next.pop(model, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(time.monotonic())

    def next(self, model: str) -> asyncio.Future[float]:
        return self._next.setdefault(model, asyncio.get_running_loop().create_future())


async def ask_all(router: Router, asked: Sequence[Question], concurrency: int) -> list[Answer]:
    answers: dict[int, Answer] = {}
    todo = iter(enumerate(asked))

    async def work() -> None:
        for index, question in todo:
            answers[index] = answer_of(await router.generate(question.prompt, **question.sampling))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answers[index] for index in range(len(asked))]


async def undisturbed(asked: Sequence[Question], source: Path = RECIPE) -> list[Answer]:
    with tempfile.TemporaryDirectory() as folder:
        async with Router(demo(Path(folder), source=source)) as router:
            return await ask_all(router, asked, 32)


@asynccontextmanager
async def load(
    router: Router, asked: Sequence[Question], expected: Sequence[Answer], concurrency: int
) -> AsyncIterator[Counter[str]]:
    """So many requests run at all times, again and again; every answer is compared when this ends.

    Gives a counter of how many were answered, lost and wrong.
    """
    counts: Counter[str] = Counter()
    over = False

    async def work(offset: int) -> None:
        index = offset
        while not over:
            question = asked[index % len(asked)]
            try:
                answer = answer_of(await router.generate(question.prompt, **question.sampling))
            except Exception as error:
                counts["lost"] += 1
                print(f"lost: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                counts["answered"] += 1
                if answer != expected[index % len(asked)]:
                    counts["wrong"] += 1
                    print(f"wrong: {question} {answer}", file=sys.stderr)
            index += concurrency

    async with asyncio.TaskGroup() as tasks:
        for offset in range(concurrency):
            tasks.create_task(work(offset))
        try:
            yield counts
        finally:
            over = True


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {
        name: round(ordered[min(int(share * len(ordered)), last)] * 1e3, 1) for name, share in shares.items()
    }


def supervisors(router: Router) -> dict[str, Supervisor]:
    assert router._system is not None
    return {actor.model.name: actor.supervisor for actor in router._system.actors.values()}
