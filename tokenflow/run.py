"""``tokenflow run``: answer a prompt or a file of prompts.  Text goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import anyio

from tokenflow.console import Painter, share_line
from tokenflow.errors import InvalidRequest, RecipeError, RequestError, TokenflowError
from tokenflow.loop import loop_factory
from tokenflow.prompts import Prompt, sampling_params
from tokenflow.router import Router
from tokenflow.settings import settings
from tokenflow.types import Completion

_SAMPLING = (
    "max_tokens min_tokens temperature top_k top_p min_p seed repetition_penalty presence_penalty "
    "frequency_penalty stop ignore_eos logprobs"
).split()
_PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
_OUTPUT_KEYS = frozenset(("index", "prompt", "text", "finish_reason", "tokens", "usage", "timing", "error"))


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if (args.prompt is None) == (args.input is None):
        return _usage("give a PROMPT (or - for stdin) or --input FILE, one of the two")
    if args.output is not None and args.input is None:
        return _usage("--output goes with --input; a single answer is printed")
    if args.trace and (args.json or args.input is not None):
        return _usage("--trace marks the text of one PROMPT; it does not go with --json or --input")
    try:
        if args.output is not None and Path(args.output).exists() and Path(args.output).samefile(args.input):
            return _usage("--output would overwrite --input; give another file")
        logging.basicConfig(level=settings().log_level, format="%(message)s", stream=sys.stderr)
        router = Router(args.recipe, overrides=args.overrides)
        sampling = {name: getattr(args, name) for name in _SAMPLING}
        sampling_params(sampling)
        # Before the event loop starts: Ctrl-C could not interrupt it there.
        text = _read_stdin() if args.prompt == "-" else args.prompt
        if text == "":
            return _usage("the prompt is empty; give at least one character")
        with ExitStack() as files:
            source = files.enter_context(_open_rows(args.input)) if args.input else None
            sink = files.enter_context(Path(args.output).open("w", encoding="utf-8")) if args.output else None
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(_run(args, router, sampling, text, source, sink))
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    except InvalidRequest as error:
        return _usage(str(error))
    except (TokenflowError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"tokenflow: {error}", file=sys.stderr)
        return 1


def _usage(message: str) -> int:
    print(f"tokenflow run: {message}", file=sys.stderr)
    return 2


def _read_stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


def _open_rows(path: str) -> TextIO:
    """The input file; bytes that are no UTF-8 fail the row they are in, not the file."""
    return Path(path).open(encoding="utf-8", errors="surrogateescape")


async def _run(
    args: argparse.Namespace,
    router: Router,
    sampling: Mapping[str, Any],
    text: str,
    source: TextIO | None,
    sink: TextIO | None,
) -> int:
    names = ", ".join(f"{model.name} ({model.config.path})" for model in router.recipe.models)
    print(f"{router.recipe.name}: loading {names}", file=sys.stderr)
    started = time.monotonic()
    async with router:
        print(f"{router.recipe.name}: ready in {time.monotonic() - started:.1f} s", file=sys.stderr)
        if source is not None:
            return await _batch(args, router, sampling, source, sink)
        prompt: Prompt = [{"role": "user", "content": text}] if args.chat else text
        if args.json:
            completion = await router.generate(prompt, **sampling)
            print(json.dumps(as_row(0, {"prompt": prompt}, completion), ensure_ascii=False))
        else:
            completion = await _print_stream(args.trace, router, prompt, sampling)
        print(share_line(completion), file=sys.stderr)
        return 0


async def _print_stream(
    trace: bool, router: Router, prompt: Prompt, sampling: Mapping[str, Any]
) -> Completion:
    """Print text as it comes."""
    color = sys.stdout.isatty() and not settings().no_color
    painter = Painter([model.name for model in router.recipe.models], color) if trace else None
    completion = None
    async with router.stream(prompt, **sampling) as response:
        async for event in response:
            completion = event.completion
            sys.stdout.write(painter.paint(event) if painter else event.text)
            sys.stdout.flush()
    sys.stdout.write((painter.end() if painter else "") + "\n")
    sys.stdout.flush()
    if painter:
        print(painter.legend(), file=sys.stderr)
    assert completion is not None
    return completion


async def _batch(
    args: argparse.Namespace, router: Router, sampling: Mapping[str, Any], source: TextIO, sink: TextIO | None
) -> int:
    """Answer every row of a file; rows that fail say so in their own output row."""
    from tqdm import tqdm

    lines = [(number, line) for number, line in enumerate(source, 1) if line.strip()]
    printed = Ordered(sink or sys.stdout, as_json=args.json or sink is not None)
    todo = iter(enumerate(lines))
    started = time.monotonic()
    with tqdm(total=len(lines), unit="prompt", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        async def work() -> None:
            for index, (number, line) in todo:
                row: dict[str, Any] = {}
                try:
                    row = parse_row(line, number)
                    completion = await router.generate(_prompt_of(row), **sampling)
                    printed.add(index, as_row(index, row, completion), completion.text)
                except RequestError as error:
                    printed.fail(index, row, error)
                bar.update()

        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(args.concurrency):
                    tasks.start_soon(work)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    seconds = time.monotonic() - started
    rate = printed.tokens / seconds if seconds else 0.0
    failed = f", {printed.failures} failed" if printed.failures else ""
    print(
        f"{len(lines)} prompts{failed}, {printed.tokens} tokens in {seconds:.1f} s ({rate:.0f} tokens/s)",
        file=sys.stderr,
    )
    return 1 if printed.failures else 0


class Ordered:
    """Writes rows in the order of the input, each as soon as those before it are there."""

    def __init__(self, sink: TextIO, as_json: bool) -> None:
        self.tokens = 0
        self.failures = 0
        self._sink = sink
        self._as_json = as_json
        self._waiting: dict[int, str] = {}
        self._next = 0

    def add(self, index: int, row: Mapping[str, Any], text: str) -> None:
        """A row was answered."""
        self.tokens += row["usage"]["completion_tokens"]
        self._put(index, json.dumps(row, ensure_ascii=False) if self._as_json else text)

    def fail(self, index: int, row: Mapping[str, Any], error: RequestError) -> None:
        """A row failed."""
        self.failures += 1
        print(f"tokenflow run: row {index}: {error}", file=sys.stderr)
        report = {
            **_copied(row),
            **({"prompt": row["prompt"]} if "prompt" in row else {}),
            "index": index,
            "error": {"type": type(error).__name__, "message": str(error)},
        }
        self._put(index, json.dumps(report, ensure_ascii=False) if self._as_json else "")

    def _put(self, index: int, line: str) -> None:
        self._waiting[index] = line
        for ready in self._take():
            self._sink.write(ready + "\n")

    def _take(self) -> Iterator[str]:
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next += 1


def parse_row(line: str, number: int) -> dict[str, Any]:
    """An input row; :raises InvalidRequest: if the line is not a JSON object with a prompt."""
    try:
        row = json.loads(line)
        # Half a surrogate pair, as an escape or from bytes that are no UTF-8, could not be written again.
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"line {number} is not JSON: {error}", "prompt") from None
    if not isinstance(row, dict) or not any(row.get(key) is not None for key in _PROMPT_KEYS):
        raise InvalidRequest(f"line {number} has none of the keys {', '.join(_PROMPT_KEYS)}", "prompt")
    return row


def _prompt_of(row: Mapping[str, Any]) -> Prompt:
    key = next(key for key in _PROMPT_KEYS if row.get(key) is not None)
    prompt = row[key]
    if not isinstance(prompt, str | list if key == "prompt" else list):
        kind = "a text or a list" if key == "prompt" else "a list"
        raise InvalidRequest(f"{key} must be {kind}, got {type(prompt).__name__}", key)
    return prompt


def _copied(row: Mapping[str, Any]) -> dict[str, Any]:
    """What an output row keeps of its input row: the keys that are not the output's own."""
    return {key: value for key, value in row.items() if key not in _OUTPUT_KEYS}


def as_row(index: int, row: Mapping[str, Any], completion: Completion) -> dict[str, Any]:
    """The output row of a completion; keys of the input row that are not ours are kept."""
    usage, timing = completion.usage, completion.timing
    return {
        **_copied(row),
        "index": index,
        "prompt": _prompt_of(row),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": [
            {"id": token.id, "text": token.text, "model": token.model, "logprob": token.logprob}
            for token in completion.tokens
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "by_model": dict(usage.by_model),
            "handoffs": usage.handoffs,
            "dropped": usage.dropped,
        },
        "timing": {"ttft_s": timing.ttft_s, "latency_s": timing.latency_s},
    }
