"""One command for a machine with a GPU: do both engines work there, and how fast are they?

::

    python -m bench.gpu_check                    # everything, in under eight minutes
    python -m bench.gpu_check --part steps       # a part of it: conformance, steps or recipe
    python -m bench.gpu_check --device cpu       # tries the check itself, with small shapes

*Conformance* runs the tests of the engine protocol.  *Steps* times decode steps of random models in the
shapes of Qwen3-0.6B and 8B, on SGLang with and without CUDA graphs.  *Recipe* runs the pair through the whole
runtime, handing over as R-Stitch does; random weights have no entropy to go by, so a coin decides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.shapes import MID, QWEN_0_6B, QWEN_8B, Shape, write_model
from tokenflow.engines.base import Engine, Extend
from tokenflow.engines.sglang import SglangEngine
from tokenflow.engines.sglang.seams import require_sglang
from tokenflow.engines.torch import TorchEngine
from tokenflow.errors import UnsupportedModel
from tokenflow.router import Router
from tokenflow.types import ModelConfig

ROOT = Path(__file__).parents[1]
PARTS = ("conformance", "steps", "recipe")
TINY = Shape(layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=64, vocab=512)
PROMPT, KV_CACHE = 256, 32_768
CONFORMANCE_S = 210


@dataclass(frozen=True)
class Plan:
    """What is run: ``steps`` decode steps at each of ``batches``, and ``tokens`` per response."""

    device: str
    shapes: dict[str, Shape]
    batches: tuple[int, ...]
    concurrencies: tuple[int, ...]
    steps: int
    tokens: int


ON_GPU = Plan("cuda", {"0.6B": QWEN_0_6B, "8B": QWEN_8B}, (1, 4, 16), (1, 4, 16), 60, 128)
ON_CPU = Plan("cpu", {"0.6B": TINY, "8B": MID}, (1, 2), (1, 2), 5, 16)


def installed() -> tuple[tuple[str, ...], str]:
    """The engines that can be tried, and why not both."""
    try:
        require_sglang()
    except UnsupportedModel as error:
        return ("torch",), str(error)
    return ("torch", "sglang"), ""


def conformance(plan: Plan) -> Iterator[str]:
    """The tests of the engine protocol, in a process of their own."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "tests/cuda", "--device", plan.device]
    try:
        done = subprocess.run(
            [*command, "--timeout", "120"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=CONFORMANCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"conformance   not done after {CONFORMANCE_S} s: run {' '.join(command[1:])}"
        return
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    yield f"conformance   {lines[-1]}   ({time.perf_counter() - started:.0f} s)"
    if done.returncode:
        yield "\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  ")))


def step_times(plan: Plan, engines: Sequence[str], folders: dict[str, Path]) -> Iterator[str]:
    """Milliseconds of decode steps by batch size.

    Each engine has a process of its own, which takes its memory with it; one that fails says so in its line.
    """
    yield f"{'decode step, ms':28}" + "".join(f"{f'batch {batch}':>10}" for batch in plan.batches)
    for name in engines:
        for shape, folder in folders.items():
            for graphs in (True, False) if name == "sglang" and plan.device != "cpu" else (False,):
                label = f"{name} {shape}{' CUDA graphs' if graphs else ''}"
                yield _row(label, partial(_timed_apart, plan, name, folder, graphs), "{:10.2f}")


def _row(label: str, measure: Callable[[], Sequence[float]], form: str) -> str:
    try:
        return f"{label:28}" + "".join(form.format(value) for value in measure())
    except Exception as error:
        return f"{label:28}failed: {error}"


def _timed_apart(plan: Plan, name: str, folder: Path, graphs: bool) -> list[float]:
    engine = ["--engine", name, "--model", str(folder), *(["--graphs"] if graphs else [])]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--device", plan.device, *engine],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def _engine(name: str, folder: Path, plan: Plan, graphs: bool) -> Engine:
    config = ModelConfig(
        path=str(folder), device=plan.device, dtype="bfloat16", kv_cache=KV_CACHE, max_requests=16
    )
    return TorchEngine(config) if name == "torch" else SglangEngine(config, cuda_graphs=graphs)


def _decode_ms(engine: Engine, batch: int, steps: int) -> float:
    slots = []
    for index in range(batch):
        prompt = [3 + (7 * index + i) % 400 for i in range(PROMPT)]
        slot, cached = engine.open(prompt)
        engine.step([Extend(slot, prompt[cached:], "none")])
        slots.append(slot)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        # As in a worker: the step is over when its tokens are here.
        engine.step([Extend(slot, [9]) for slot in slots]).logits.argmax(-1).tolist()
        times.append(time.perf_counter() - started)
    for slot in slots:
        engine.release(slot)
    return 1e3 * statistics.median(times)


def recipe(plan: Plan, engines: Sequence[str], folders: dict[str, Path]) -> Iterator[str]:
    """Output tokens per second of the pair, by concurrency and by where its members run."""
    yield f"{'pair, tokens/s':28}" + "".join(f"{f'{n} at once':>10}" for n in plan.concurrencies)
    pairs = [("torch", "torch")]
    if "sglang" in engines:
        pairs += [("sglang", "sglang"), ("torch", "sglang")]
    for slm, llm in pairs:
        rates = partial(asyncio.run, _rates(plan, _pair(plan, folders, slm, llm)))
        yield _row(f"0.6B {slm}, 8B {llm}", rates, "{:10.1f}")


async def _rates(plan: Plan, pair: dict[str, Any]) -> list[float]:
    rates = []
    async with Router(pair) as router:
        for concurrency in plan.concurrencies:
            prompts = [[5 + (11 * i + j) % 400 for j in range(PROMPT)] for i in range(2 * concurrency)]
            started = time.perf_counter()
            answers = await router.generate_many(
                prompts, concurrency=concurrency, max_tokens=plan.tokens, ignore_eos=True, seed=1
            )
            tokens = sum(len(answer.tokens) for answer in answers)
            rates.append(tokens / (time.perf_counter() - started))
    return rates


def _pair(plan: Plan, folders: dict[str, Path], slm: str, llm: str) -> dict[str, Any]:
    def model(folder: Path, engine: str) -> dict[str, Any]:
        placed = {"path": str(folder), "engine": engine, "device": plan.device, "dtype": "bfloat16"}
        return {**placed, "kv_cache": KV_CACHE, "max_requests": 16}

    return {
        "name": "pair",
        "entry": "slm",
        "models": {"slm": model(folders["0.6B"], slm), "llm": model(folders["8B"], llm)},
        "routes": {
            "slm": [{"when": "entropy >= 0 and draw < 0.1", "to": "llm", "send": "drop_last"}],
            "llm": [{"when": "entropy >= 0 and draw < 0.5", "to": "slm", "send": "keep"}],
        },
    }


def main() -> None:
    """Run the parts and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    for one in ("--engine", "--model"):
        parser.add_argument(one, help=argparse.SUPPRESS)
    parser.add_argument("--graphs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    plan = ON_GPU if arguments.device == "cuda" else ON_CPU
    if plan.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu tries the check itself")
    if arguments.engine:
        engine = _engine(arguments.engine, Path(arguments.model), plan, arguments.graphs)
        print(json.dumps([_decode_ms(engine, batch, plan.steps) for batch in plan.batches]))
        return
    parts = arguments.part or PARTS
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU, small shapes"
    engines, missing = installed()
    print(f"tokenflow on {name}; torch {torch.__version__}; engines: {', '.join(engines)} {missing}".rstrip())
    started = time.perf_counter()
    if "conformance" in parts:
        for line in conformance(plan):
            print(line, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folders = {}
        if {"steps", "recipe"} & set(parts):
            for shape, dimensions in plan.shapes.items():
                folders[shape] = write_model(Path(temporary) / shape, dimensions, plan.device)
        for part, measure in (("steps", step_times), ("recipe", recipe)):
            if part in parts:
                for line in measure(plan, engines, folders):
                    print(line, flush=True)
    print(f"done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
