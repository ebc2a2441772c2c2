"""Records what the reference answers to the demo's evaluation prompts, and reads it back.

::

    python -m tests.reference.record

The whole record takes minutes, since nothing is cached; tests read it instead.  It holds for exactly one set
of weights, prompts and version of the reference: :func:`load_traces` refuses anything else.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from tests.reference.reference import VERSION, LastLogits, NearTie, ReferenceModels, RStitch, Trace

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
MODELS: Mapping[str, Path] = {"slm": DEMO / "small", "llm": DEMO / "large"}
TRACES = Path(__file__).parent / "traces" / "r_stitch.jsonl.gz"
TAUS = (-1.0, 0.01, 0.03, 0.1, 1.0)

Job = tuple[int, list[int], Sequence[float], int]
"""Index of a prompt, its token ids, the taus, most output tokens."""


class StaleTraces(Exception):
    """The recorded traces are of other weights or prompts, or of another version of the reference."""


@dataclass(frozen=True)
class Recorded:
    """Recorded traces of R-Stitch by (tau, index of the prompt), and the token ids of the prompts."""

    traces: Mapping[tuple[float, int], Trace]
    prompts: Sequence[list[int]]
    max_tokens: int


def eval_rows(count: int) -> list[dict[str, Any]]:
    """The first ``count`` evaluation prompts, as rows of a batch input file."""
    with (DEMO / "eval.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def encode(rows: Sequence[Mapping[str, Any]], model: Path) -> list[list[int]]:
    """Token ids of each row's ``messages`` in the model's chat template, or of its ``prompt``."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        if "messages" in row
        else tokenizer.encode(row["prompt"])
        for row in rows
    ]


def load_traces(models: Mapping[str, Path] = MODELS, path: Path = TRACES) -> Recorded:
    """Read the record.

    :param models: the directories of the models that are to be compared with it.
    :raises StaleTraces: if it was made with other weights, prompts or reference; says which.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        head, *rows = map(json.loads, lines)
    prompts = encode(eval_rows(head["count"]), models["slm"])
    now = _head(models, prompts, head["max_tokens"])
    stale = [key for key in now if head[key] != now[key]]
    if stale:
        raise StaleTraces(f"{path}: other {', '.join(stale)}; record anew: python -m tests.reference.record")
    return Recorded(
        traces={(row["tau"], row["prompt"]): _unpacked(row) for row in rows},
        prompts=prompts,
        max_tokens=head["max_tokens"],
    )


def record(path: Path, taus: Sequence[float], count: int, max_tokens: int, processes: int) -> Iterator[int]:
    """Compute and write all traces; yields how many prompts are done.

    :param processes: how many compute; 1 is this one.
    """
    prompts = encode(eval_rows(count), MODELS["slm"])
    jobs: list[Job] = [(index, prompt, taus, max_tokens) for index, prompt in enumerate(prompts)]
    head = _head(MODELS, prompts, max_tokens)
    partial = path.with_name(f"{path.name}.partial")
    partial.parent.mkdir(exist_ok=True)
    with (
        _answers(jobs, processes) as answers,
        partial.open("wb") as raw,
        # Without a name and a time in it, the same traces give the same file.
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,
    ):
        file.write(json.dumps(head).encode() + b"\n")
        for done, rows in enumerate(answers, 1):
            for row in rows:
                file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            yield done
    partial.replace(path)


def _head(models: Mapping[str, Path], prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Any]:
    return {
        "reference": VERSION,
        "weights": {
            name: hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
            for name, directory in models.items()
        },
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "count": len(prompts),
        "max_tokens": max_tokens,
    }


def _packed(trace: Trace) -> dict[str, Any]:
    return {
        "tokens": trace.tokens,
        "runs": [(model, len(list(run))) for model, run in groupby(trace.models)],
        "near_ties": trace.near_ties,
        "finish": trace.finish_reason,
        "handoffs": trace.handoffs,
        "dropped": trace.dropped,
    }


def _unpacked(row: Mapping[str, Any]) -> Trace:
    return Trace(
        tokens=tuple(row["tokens"]),
        models=tuple(model for model, length in row["runs"] for _ in range(length)),
        near_ties=tuple(NearTie(*tie) for tie in row["near_ties"]),
        finish_reason=row["finish"],
        handoffs=row["handoffs"],
        dropped=row["dropped"],
    )


_models: ReferenceModels


@contextmanager
def _answers(jobs: Sequence[Job], processes: int) -> Iterator[Iterator[list[dict[str, Any]]]]:
    if processes == 1:
        _load(MODELS)
        yield map(_answer, jobs)
    else:
        with ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=_load, initargs=(MODELS,)
        ) as pool:
            yield pool.map(_answer, jobs)


def _load(models: Mapping[str, Path]) -> None:
    global _models
    _models = ReferenceModels.load(models)


def _answer(job: Job) -> list[dict[str, Any]]:
    """The traces of one prompt.

    Whole prefixes recur from one tau to the next; each is run once.
    """
    index, prompt, taus, max_tokens = job
    known: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def once(name: str, model: LastLogits) -> LastLogits:
        def last_logits(ids: Sequence[int]) -> Tensor:
            key = name, tuple(ids)
            if key not in known:
                known[key] = model(ids)
            return known[key]

        return last_logits

    models = replace(_models, models={name: once(name, model) for name, model in _models.models.items()})
    return [
        {"tau": tau, "prompt": index, **_packed(models.run(RStitch(tau), prompt, max_tokens))} for tau in taus
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reference.record", description=__doc__)
    parser.add_argument("--output", type=Path, default=TRACES)
    parser.add_argument("--tau", type=float, nargs="+", default=TAUS)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    started = time.monotonic()
    for done in record(
        arguments.output, arguments.tau, arguments.prompts, arguments.max_tokens, arguments.processes
    ):
        if done % 10 == 0 or done == arguments.prompts:
            print(f"{done} prompts, {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
