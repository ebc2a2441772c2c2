"""What routing costs: compiled rules beside the same written by hand, and routing beside a model's step.

::

    python -m bench.route

Rules: from what a worker has after a step (its rows, the sampled tokens, logits) to a destination for each
row, by the compiled rules of a recipe and by a function in plain torch that does the same and nothing else.
The two alternate, and the ratio is the median over their pairs.

Heads: the rule of each router head, head included, beside one decode step of the torch engine for a batch of
8.  The published R2R head of width 1024 multiplies more weights than the 29 M model has, so it is also seen
beside a model as small as the smallest that it was published for, of the shape of Qwen3-0.6B.  All weights
are random, those of models in bfloat16; one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench.shapes import EOS, MID, QWEN_0_6B, Shape, write_model
from tokenflow.dsl.expr import parse_condition
from tokenflow.engines.base import Engine, EngineInfo, Extend
from tokenflow.engines.torch import TorchEngine
from tokenflow.routing.heads import citer
from tokenflow.routing.heads.r2r import MODEL_TYPE, BlockSize, Sizes
from tokenflow.types import ModelConfig, SamplingParams
from tokenflow.wire.messages import VERSION, HeadSpec, Hello, Open, RouteRule, Row
from tokenflow.worker.residents import Resident
from tokenflow.worker.route import Route

RESULTS = Path(__file__).parent / "results" / "route.json"
VOCABULARIES = (8192, 151_936)
BATCHES = (1, 8, 32)
PARAMS = {"tau": 0.5}
LLM = 2

Rows = Sequence[tuple[Row, Resident]]
ByHand = Callable[[Rows, Sequence[int], Tensor], list[int]]


def taus(rows: Rows) -> Tensor:
    return torch.tensor([resident.settings.params[0] for _, resident in rows])


def positions(rows: Rows) -> Tensor:
    return torch.tensor([resident.fed - resident.settings.prompt_tokens for _, resident in rows])


def run_lengths(rows: Rows) -> Tensor:
    return torch.tensor([row.run_length + 1 for row, _ in rows])


def entropies(logits: Tensor) -> Tensor:
    log_probs = torch.log_softmax(logits, -1)
    return -(log_probs.exp() * log_probs).sum(-1) / math.log(logits.shape[-1])


def r_stitch(rows: Rows, tokens: Sequence[int], logits: Tensor) -> list[int]:
    return torch.where(entropies(logits) > taus(rows), LLM, 0).tolist()


def max_prob(rows: Rows, tokens: Sequence[int], logits: Tensor) -> list[int]:
    return torch.where(torch.softmax(logits, -1).amax(-1) < taus(rows), LLM, 0).tolist()


def margin(rows: Rows, tokens: Sequence[int], logits: Tensor) -> list[int]:
    first, second = torch.softmax(logits, -1).topk(2).values.unbind(1)
    return torch.where((first - second < taus(rows)) & (positions(rows) > 20), LLM, 0).tolist()


def three(rows: Rows, tokens: Sequence[int], logits: Tensor) -> list[int]:
    log_probs = torch.log_softmax(logits, -1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(-1) / math.log(logits.shape[-1])
    fired = (entropy > taus(rows)) | (probs.amax(-1) < 0.2) | (run_lengths(rows) >= 64)
    return torch.where(fired, LLM, 0).tolist()


def window(rows: Rows, tokens: Sequence[int], logits: Tensor) -> list[int]:
    entropy = entropies(logits).double()
    kept = torch.tensor([r.state or [0.0, 0.0, 0.0] for _, r in rows], dtype=torch.float64)
    mean = (kept[:, 1] + kept[:, 2] + entropy) / (kept[:, 0] + 1)
    latest = torch.stack(((kept[:, 0] + 1).clamp_max(2), kept[:, 2], entropy), 1).tolist()
    for (_, resident), state in zip(rows, latest, strict=True):
        resident.state = state
    return torch.where(mean.float() > taus(rows), LLM, 0).tolist()


def after(rows: Rows, tokens: Sequence[int], logits: Tensor) -> list[int]:
    return torch.where(run_lengths(rows) >= 4, LLM, 0).tolist()


RULES: dict[str, tuple[tuple[str, ...], ByHand]] = {
    "entropy > tau": (("entropy > tau",), r_stitch),
    "confidence < tau": (("confidence < tau",), max_prob),
    "margin < tau and position > 20": (("margin < tau and position > 20",), margin),
    "three rules": (("entropy > tau", "confidence < 0.2", "run_length >= 64"), three),
    "window(entropy, 3) > tau": (("window(entropy, 3) > tau",), window),
    "run_length >= 4": (("run_length >= 4",), after),
}


@dataclass(frozen=True, slots=True)
class Bare:
    """An engine as far as rules without heads know it."""

    info: EngineInfo


def step_rows(batch: int, context: int = 260, prompt: int = 4) -> list[tuple[Row, Resident]]:
    """Requests that have just got a token."""
    rows = []
    for handle in range(batch):
        settings = Open(handle, 0, prompt, handle, SamplingParams(), tuple(PARAMS.values()))
        resident = Resident(settings)
        resident.tokens += range(1, context + 1)
        resident.fed = context
        rows.append((Row(handle, 0, context, [1], 5), resident))
    return rows


def compiled(folder: Path, engine: object, conditions: Sequence[str], *heads: HeadSpec) -> Route:
    names = [head.name for head in heads]
    rules = tuple(RouteRule(parse_condition(text, PARAMS, names), LLM) for text in conditions)
    config = ModelConfig(path=str(folder))
    hello = Hello(VERSION, "slm", 1, config, rules, tuple(PARAMS), 2**31, (EOS,), heads, models=2)
    return Route(hello, cast(Engine, engine))


def beside(
    route: Route, by_hand: ByHand, rows: Rows, tokens: list[int], logits: Tensor, pairs: int
) -> dict[str, float]:
    """Compiled rules beside hand-written ones: medians of both, and of the ratio of neighbours."""
    hidden = torch.zeros(len(rows), 8)
    decided = [decision.destination for decision in route(rows, tokens, logits, hidden)]
    assert decided == by_hand(rows, tokens, logits)
    ours, theirs = [], []
    for _ in range(pairs):
        started = time.perf_counter()
        route(rows, tokens, logits, hidden)
        between = time.perf_counter()
        by_hand(rows, tokens, logits)
        ours.append(between - started)
        theirs.append(time.perf_counter() - between)
    return {
        "compiled_us": round(statistics.median(ours) * 1e6, 1),
        "by_hand_us": round(statistics.median(theirs) * 1e6, 1),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
    }


def rules(pairs: int) -> Iterator[dict[str, Any]]:
    """Every set of rules, at every width of the vocabulary and batch."""
    for vocabulary in VOCABULARIES:
        engine = Bare(EngineInfo(vocabulary, 8, 4096, 65536, 1, 64, (EOS,), "cpu", "float32"))
        for batch in BATCHES:
            logits = 3 * torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(batch))
            rows, tokens = step_rows(batch), list(range(batch))
            count = pairs if vocabulary * batch < 1e6 else max(pairs // 10, 20)
            for name, (conditions, by_hand) in RULES.items():
                route = compiled(Path(), engine, conditions)
                measured = beside(route, by_hand, rows, tokens, logits, count)
                yield {"rule": name, "vocabulary": vocabulary, "batch": batch, **measured}


def r2r_checkpoint(file: Path, hidden: int) -> int:
    """A random R2R head of the published sizes; returns how many weights are multiplied once it is folded."""
    width, inner = 1024, 4096
    sizes = Sizes(hidden, hidden, 100, width, (BlockSize(width, inner, width),) * 6, normalize=False)
    state = {name: torch.randn(shape) * 0.02 for name, shape in sizes.shapes().items()}
    threshold = {"threshold": 0.5}
    torch.save({"model_type": MODEL_TYPE, "common_args": threshold, "state_dict": state}, file)
    return (2 * hidden + 100) * width + 6 * 2 * width * inner + width


def citer_checkpoint(file: Path, hidden: int) -> int:
    """A random CITER head; returns how many weights are multiplied once it is folded."""
    state = {name: torch.rand(shape) * 0.02 for name, shape in citer.shapes(hidden).items()}
    torch.save(state, file)
    return 2 * hidden * hidden + 2 * hidden


def heads(shape: Shape, name: str, context: int, rounds: int, batch: int = 8) -> Iterator[dict[str, Any]]:
    """The rules of heads, and one without, beside a model's step, all in turn."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), shape)
        engine = TorchEngine(ModelConfig(path=str(folder), max_requests=batch, prefix_cache=False))
        r2r, own = folder / "router.pt", folder / "router.pth"
        weights = {
            "R2R": r2r_checkpoint(r2r, shape.hidden),
            "CITER": citer_checkpoint(own, shape.hidden),
            "none": 0,
        }
        routes = {
            ("none", "float32"): compiled(folder, engine, ["entropy > tau"]),
            **{
                (head, dtype): compiled(
                    folder, engine, [condition], HeadSpec("h", kind, str(path), None, dtype)
                )
                for head, kind, path, condition in (
                    ("R2R", "r2r", r2r, 'head("h") >= threshold("h")'),
                    ("CITER", "citer", own, 'head("h") < tau'),
                )
                for dtype in ("float32", "bfloat16")
            },
        }
        slots = [engine.open([1 + row] * context).slot for row in range(batch)]
        for row, slot in enumerate(slots):
            engine.step([Extend(slot, [1 + row] * context, "none")])
        rows, tokens = step_rows(batch, context), list(range(1, batch + 1))
        steps: list[float] = []
        routing: dict[tuple[str, str], list[float]] = {key: [] for key in routes}
        for _ in range(rounds):
            started = time.perf_counter()
            output = engine.step([Extend(slot, [token]) for slot, token in zip(slots, tokens, strict=True)])
            steps.append(time.perf_counter() - started)
            with torch.inference_mode():
                logits = output.logits.float()
                for key, route in routes.items():
                    started = time.perf_counter()
                    route(rows, tokens, logits, output.hidden)
                    routing[key].append(time.perf_counter() - started)
        engine.close()
    for (head, dtype), taken in routing.items():
        yield {
            "model": name,
            "head": head,
            "dtype": dtype,
            "batch": batch,
            "weights_m": round(weights[head] / 1e6, 1),
            "model_weights_m": round(shape.parameters / 1e6, 1),
            "step_ms": round(statistics.median(steps) * 1e3, 2),
            "route_ms": round(statistics.median(taken) * 1e3, 3),
            "share": round(statistics.median(a / b for a, b in zip(taken, steps, strict=True)), 4),
        }


def main() -> None:
    """Measure, print tables, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400, help="times that each rule is measured")
    parser.add_argument(
        "--rounds", type=int, default=60, help="steps of the 29 M model; a fifth of the other"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # As after loading weights: once a large block was freed, the C library keeps such blocks for later steps.
    torch.ones(7_900_000)
    with torch.inference_mode():
        by_rule = list(rules(arguments.pairs))
    print(f"{'rule':32} {'vocabulary':>10} {'batch':>5} {'compiled':>11} {'by hand':>11} {'ratio':>6}")
    for row in by_rule:
        print(
            f"{row['rule']:32} {row['vocabulary']:>10} {row['batch']:>5} {row['compiled_us']:>8} us "
            f"{row['by_hand_us']:>8} us {row['ratio']:>6}"
        )
    by_head = [
        *heads(MID, "29 M", 240, arguments.rounds),
        *heads(QWEN_0_6B, "Qwen3-0.6B shape", 16, max(arguments.rounds // 5, 5)),
    ]
    print(f"\n{'model':18} {'head':6} {'in':9} {'weights':>16} {'step':>10} {'route, head':>12} {'share':>7}")
    for row in by_head:
        weights = f"{row['weights_m']} / {row['model_weights_m']} M"
        print(
            f"{row['model']:18} {row['head']:6} {row['dtype']:9} {weights:>16} {row['step_ms']:>7} ms "
            f"{row['route_ms']:>9} ms {row['share']:>7.1%}"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    figures = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "rules": by_rule,
        "heads": by_head,
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
