"""What it costs to come back to a model: a parked request with k new tokens, beside two other ways.

::

    python -m bench.resume torch
    PYTHONPATH=tests/sglang/shims:. .venv-sglang/bin/python -m bench.resume sglang

On the 29 M random model in float32.  *Resumed*: a request whose KV cache was kept while another one went
on gets k tokens.  *Stayed*: the same extension of a request that never left.  *Anew*: the whole of it is
computed again, as where nothing is kept.  Medians of single steps, without other load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.shapes import MID, write_model
from tokenflow.engines.base import Engine, Extend
from tokenflow.engines.load import load_engine
from tokenflow.types import ModelConfig

RESULTS = Path(__file__).parent / "results"
CONTEXTS, ADDED, REPEATS, ANEW, MEANWHILE = (512, 1024), (1, 4, 16), 12, 3, 4


def timed(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(engine: Engine, context: int, added: int) -> dict[str, float]:
    """Milliseconds to add ``added`` tokens to ``context``: resumed, stayed, anew."""
    prompt = [3 + i % 1000 for i in range(context)]
    more = [5 + i for i in range(added)]
    parked, busy, whole = (engine.open(prompt).slot for _ in range(3))
    for slot in (parked, busy):
        engine.step([Extend(slot, prompt, "none")])
    seconds: dict[str, list[float]] = {"resumed": [], "stayed": [], "anew": []}
    for turn in range(REPEATS):
        for token in range(MEANWHILE):
            engine.step([Extend(busy, [7 + token])])
        seconds["resumed"].append(timed(lambda: engine.step([Extend(parked, more)])))
        engine.truncate(busy, context)
        seconds["stayed"].append(timed(lambda: engine.step([Extend(busy, more)])))
        if turn < ANEW:
            seconds["anew"].append(timed(lambda: engine.step([Extend(whole, [*prompt, *more])])))
        for slot, length in ((parked, context), (busy, context), (whole, 0)):
            engine.truncate(slot, length)
    for slot in (parked, busy, whole):
        engine.release(slot)
    return {name: round(1e3 * statistics.median(values), 3) for name, values in seconds.items()}


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("torch", "sglang"))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), MID)
        engine = load_engine(
            ModelConfig(
                path=str(path),
                engine=arguments.engine,
                device=arguments.device,
                dtype="float32",
                kv_cache=8192,
                max_requests=32,
                prefix_cache=False,
            )
        )
        print(f"{arguments.engine}: milliseconds of one step")
        print(f"{'context':>8}{'added':>7}{'resumed':>10}{'stayed':>10}{'anew':>10}")
        for context in CONTEXTS:
            for added in ADDED:
                row = {"context": context, "added": added, **measure(engine, context, added)}
                rows.append(row)
                print("{context:8}{added:7}{resumed:10.2f}{stayed:10.2f}{anew:10.2f}".format(**row))
        engine.close()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"resume_{arguments.engine}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
