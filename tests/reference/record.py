"""Records what the reference answers to the demo's evaluation prompts, and reads it back.

::

    python -m tests.reference.record r_stitch
    python -m tests.reference.record algorithms

A whole record takes minutes, since nothing is cached; tests read it instead.  It holds for exactly one set of
weights, prompts, settings and version of the reference: :func:`load_traces` refuses anything else.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.reference.cases import DEMO, Case, Speculation, algorithm_cases, r_stitch_cases
from tests.reference.reference import VERSION, Model, NearTie, Output, ReferenceModels, Trace

Setting = Case | Speculation


@dataclass(frozen=True)
class Record:
    """What is recorded: settings by name, over the first ``count`` prompts.

    The settings use ``files`` of the demo beside their models.
    """

    name: str
    cases: Callable[[], Mapping[str, Setting]]
    count: int
    files: tuple[str, ...] = ()
    max_tokens: int = 400
    folder: Path = Path(__file__).parent / "traces"

    @property
    def path(self) -> Path:
        """The file that holds it."""
        return self.folder / f"{self.name}.jsonl.gz"


R_STITCH = Record("r_stitch", r_stitch_cases, 300)
ALGORITHMS = Record(
    "algorithms", algorithm_cases, 200, ("heads/r2r/default_router.pt", "heads/citer/citer_mlp.pth")
)
RECORDS = {record.name: record for record in (R_STITCH, ALGORITHMS)}


class StaleTraces(Exception):
    """The recorded traces are of other weights, prompts or settings, or of an older reference."""


@dataclass(frozen=True)
class Recorded:
    """Recorded traces by (name of the setting, index of the prompt), and the token ids of the prompts.

    The seed of a request is the index of its prompt.
    """

    traces: Mapping[tuple[str, int], Trace]
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


@cache
def eval_prompts(count: int) -> list[list[int]]:
    """Token ids of the first ``count`` evaluation prompts."""
    return encode(eval_rows(count), DEMO / "small")


def load_traces(record: Record = R_STITCH, demo: Path = DEMO) -> Recorded:
    """Read a record.

    :param demo: where the models and heads are that are to be compared with it.
    :raises StaleTraces: if it was made with other weights, prompts, settings or reference; says which.
    """
    with gzip.open(record.path, "rt", encoding="utf-8") as lines:
        head, *rows = map(json.loads, lines)
    prompts = eval_prompts(head["count"])
    now = _head(record, prompts, demo)
    stale = [key for key in now if head[key] != now[key]]
    if stale:
        raise StaleTraces(
            f"{record.path}: other {', '.join(stale)}; record anew: "
            f"python -m tests.reference.record {record.name}"
        )
    return Recorded(
        traces={(row["case"], row["prompt"]): _unpacked(row) for row in rows},
        prompts=prompts,
        max_tokens=head["max_tokens"],
    )


def write(record: Record, processes: int) -> Iterator[int]:
    """Compute and write all traces; yields how many prompts are done.

    :param processes: how many compute; 1 is this one.
    """
    prompts = eval_prompts(record.count)
    head = _head(record, prompts, DEMO)
    partial = record.path.with_name(f"{record.path.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with (
        _answers(record, prompts, processes) as answers,
        partial.open("wb") as raw,
        # Without a name and a time in it, the same traces give the same file.
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,
    ):
        file.write(json.dumps(head).encode() + b"\n")
        for done, rows in enumerate(answers, 1):
            for row in rows:
                file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            yield done
    partial.replace(record.path)


def load_models(cases: Mapping[str, Setting], demo: Path = DEMO) -> dict[str, ReferenceModels]:
    """The models of each setting; a checkpoint is loaded once."""
    sets = {tuple(case.models.items()) for case in cases.values()}
    networks = ReferenceModels.load({folder: demo / folder for models in sets for _, folder in models})
    loaded = {}
    for name, case in cases.items():
        paths = {member: demo / folder for member, folder in case.models.items()}
        limit = min(len(AutoTokenizer.from_pretrained(path)) for path in paths.values())
        loaded[name] = ReferenceModels(
            models={member: networks.models[folder] for member, folder in case.models.items()},
            vocab_limit=limit,
            eos=networks.eos,
            never={member: networks.never[folder] for member, folder in case.models.items()},
        )
    return loaded


def _head(record: Record, prompts: Sequence[list[int]], demo: Path) -> dict[str, Any]:
    cases = record.cases()
    folders = sorted({folder for case in cases.values() for folder in case.models.values()})
    files = [*(f"{folder}/model.safetensors" for folder in folders), *record.files]
    return {
        "reference": VERSION,
        "weights": {name: hashlib.sha256((demo / name).read_bytes()).hexdigest() for name in files},
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "settings": {name: repr(case) for name, case in cases.items()},
        "count": len(prompts),
        "max_tokens": record.max_tokens,
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


_record: Record
_models: Mapping[str, ReferenceModels]


@contextmanager
def _answers(
    record: Record, prompts: Sequence[list[int]], processes: int
) -> Iterator[Iterator[list[dict[str, Any]]]]:
    if processes == 1:
        _load(record)
        yield map(_answer, enumerate(prompts))
    else:
        with ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=_load, initargs=(record,)
        ) as pool:
            yield pool.map(_answer, enumerate(prompts))


def _load(record: Record) -> None:
    global _record, _models
    _record, _models = record, load_models(record.cases())


def _answer(job: tuple[int, list[int]]) -> list[dict[str, Any]]:
    """The traces of one prompt.

    Whole prefixes recur from one setting to the next; each is run once.
    """
    index, prompt = job
    known: dict[tuple[Model, tuple[int, ...]], Output] = {}

    def once(model: Model) -> Model:
        def run(ids: Sequence[int]) -> Output:
            key = model, tuple(ids)
            if key not in known:
                known[key] = model(ids)
            return known[key]

        return run

    rows = []
    for name, case in _record.cases().items():
        own = _models[name]
        models = replace(own, models={member: once(model) for member, model in own.models.items()})
        trace = case.trace(models, prompt, index, _record.max_tokens)
        rows.append({"case": name, "prompt": index, **_packed(trace)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reference.record", description=__doc__)
    parser.add_argument("record", choices=RECORDS)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    record = RECORDS[arguments.record]
    started = time.monotonic()
    for done in write(record, arguments.processes):
        if done % 10 == 0 or done == record.count:
            print(f"{done} prompts, {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
