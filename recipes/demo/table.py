"""Run the evaluation prompts through tokenflow: the small model alone, the large one, and R-Stitch between.

    python -m recipes.demo.table [--prompts N] [--concurrency C]

The recipe is ``recipes/demo.yaml`` with three values of tau: nothing exceeds 1, everything exceeds -1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.demo.accuracy import LARGE
from recipes.demo.scores import Outcome, overall_table, task_table
from recipes.demo.tasks import is_correct
from tokenflow.errors import TokenflowError
from tokenflow.router import Router
from tokenflow.types import Completion

HERE = Path(__file__).parent
SETTINGS = {"small only (tau 1)": 1.0, "R-Stitch, tau 0.03": 0.03, "large only (tau -1)": -1.0}
MAX_TOKENS = 400


async def answer(rows: Sequence[dict[str, Any]], tau: float, concurrency: int) -> list[Completion]:
    """Responses to all rows under one value of tau."""
    prompts = [row["messages"] for row in rows]
    async with Router(HERE.parent / "demo.yaml", overrides=[f"params.tau={tau}"]) as router:
        return await router.generate_many(prompts, concurrency=concurrency, max_tokens=MAX_TOKENS)


def outcome(row: dict[str, Any], completion: Completion) -> Outcome:
    """One response, scored."""
    return Outcome(
        task=row["task"],
        correct=is_correct(completion.text, row["reference"]),
        exact=completion.text == row["reference"],
        tokens=len(completion.tokens),
        large_tokens=completion.models.count(LARGE),
        handoffs=completion.usage.handoffs,
    )


async def measure(rows: Sequence[dict[str, Any]], concurrency: int) -> dict[str, list[Outcome]]:
    """Outcomes under every setting."""
    results = {}
    for name, tau in SETTINGS.items():
        start = time.perf_counter()
        completions = await answer(rows, tau, concurrency)
        seconds = time.perf_counter() - start
        tokens = sum(len(completion.tokens) for completion in completions)
        print(f"{name}: {tokens} tokens in {seconds:.1f} s, loading included", file=sys.stderr)
        results[name] = [outcome(*pair) for pair in zip(rows, completions, strict=True)]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.demo.table", description="Measure the demo recipe."
    )
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="only the first N prompts (default: all 1,000)"
    )
    parser.add_argument("--concurrency", type=int, default=16, metavar="C", help="(default: %(default)s)")
    args = parser.parse_args()
    rows = [json.loads(line) for line in (HERE / "eval.jsonl").read_text().splitlines()[: args.prompts]]
    try:
        results = asyncio.run(measure(rows, args.concurrency))
    except TokenflowError as error:
        sys.exit(f"error: {error}")
    print(f"{len(rows)} prompts, greedy\n", overall_table(results), "", task_table(results), sep="\n")


if __name__ == "__main__":
    main()
