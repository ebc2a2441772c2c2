"""``tokenflow run``: answer a prompt or a file of prompts.  Text goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import anyio

from tokenflow.console import Painter, share_line
from tokenflow.errors import InvalidRequest, RecipeError, RequestError, TokenflowError
from tokenflow.eventloop import new_event_loop
from tokenflow.prompts import Prompt, sampling_params
from tokenflow.router import Router
from tokenflow.rows import Ordered, RowFile, as_row, open_rows, parse_row, prompt_of
from tokenflow.settings import settings
from tokenflow.types import Completion

_SAMPLING = (
    "max_tokens min_tokens temperature top_k top_p min_p seed repetition_penalty presence_penalty "
    "frequency_penalty stop ignore_eos logprobs"
).split()


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if (args.prompt is None) == (args.input is None):
        return _usage("give a PROMPT (or - for stdin) or --input FILE, one of the two")
    if args.output is not None and args.input is None:
        return _usage("--output goes with --input; a single answer is printed")
    if args.trace and (args.json or args.input is not None):
        return _usage("--trace marks the text of one PROMPT; it does not go with --json or --input")
    if args.chat and args.input is not None:
        return _usage("--chat is for one PROMPT; rows of --input say it with the key messages")
    if args.logprobs and not (args.json or args.output):
        return _usage("--logprobs are reported in JSON; add --json")
    try:
        if _same_file(args.input, args.output):
            return _usage("--output would overwrite --input; give another file")
        logging.basicConfig(level=settings().log_level, format="%(message)s", stream=sys.stderr)
        router = Router(args.recipe, overrides=args.overrides)
        sampling = {name: getattr(args, name) for name in _SAMPLING}
        sampling_params(sampling)
        # Before the event loop starts: Ctrl-C could not interrupt it there.
        text = _read_stdin(args.chat) if args.prompt == "-" else args.prompt
        if text == "":
            return _usage("the prompt is empty; give at least one character")
        if text is not None and not _is_utf8(text):
            return _usage("the prompt is not UTF-8 text")
        with ExitStack() as files:
            out = sys.stdout
            # What functions of the recipe print is no text of a response.
            files.enter_context(redirect_stdout(sys.stderr))
            source = files.enter_context(open_rows(args.input)) if args.input else None
            # What an earlier run wrote is kept until the models are there.
            sink = files.enter_context(RowFile(args.output)) if args.output else None
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(_until_told(_run(args, router, sampling, text, source, out, sink)))
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


def _same_file(source: str | None, target: str | None) -> bool:
    if source in (None, "-") or target is None or not Path(target).exists():
        return False
    return Path(target).samefile(str(source))


def _read_stdin(chat: bool) -> str:
    """All of stdin; what somebody says in a chat does not end in a line end, though a line of a file does."""
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    return text.removesuffix("\n").removesuffix("\r") if chat else text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _until_told(work: Coroutine[Any, Any, int]) -> int:
    """Run ``work`` to its end, or until a signal says that it is over: SIGTERM and SIGHUP, as Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        if not told:
            # A second signal must not cut the way out short.
            task.cancel()
        told.append(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        # SIGHUP is ignored under nohup.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not told:
            raise
        print(f"tokenflow: ended by {told[0].name}", file=sys.stderr)
        return 128 + told[0]


async def _run(
    args: argparse.Namespace,
    router: Router,
    sampling: Mapping[str, Any],
    text: str,
    source: TextIO | None,
    out: TextIO,
    sink: RowFile | None,
) -> int:
    simulated = router.recipe.simulated
    names = ", ".join(
        f"{model.name} ({'simulated' if model.name in simulated else model.config.path})"
        for model in router.recipe.models
    )
    print(f"{router.recipe.name}: loading {names}", file=sys.stderr)
    started = time.monotonic()
    async with router:
        print(f"{router.recipe.name}: ready in {time.monotonic() - started:.1f} s", file=sys.stderr)
        if source is not None:
            return await _batch(args, router, sampling, source, out, sink)
        prompt: Prompt = [{"role": "user", "content": text}] if args.chat else text
        if args.json:
            completion = await router.generate(prompt, **sampling)
            print(json.dumps(as_row(0, {"prompt": prompt}, completion), ensure_ascii=False), file=out)
        else:
            completion = await _print_stream(args.trace, router, prompt, sampling, out)
        print(share_line(completion), file=sys.stderr)
        return 0


async def _print_stream(
    trace: bool, router: Router, prompt: Prompt, sampling: Mapping[str, Any], out: TextIO
) -> Completion:
    """Print text as it comes."""
    color = out.isatty() and not settings().no_color
    painter = Painter([model.name for model in router.recipe.models], color) if trace else None
    completion = None
    async with router.stream(prompt, **sampling) as response:
        async for event in response:
            completion = event.completion
            out.write(painter.paint(event) if painter else event.text)
            out.flush()
    out.write((painter.end() if painter else "") + "\n")
    out.flush()
    if painter:
        print(painter.legend(), file=sys.stderr)
    assert completion is not None
    return completion


async def _batch(
    args: argparse.Namespace,
    router: Router,
    sampling: Mapping[str, Any],
    source: TextIO,
    out: TextIO,
    sink: RowFile | None,
) -> int:
    """Answer every row of a file; rows that fail say so in their own output row."""
    from tqdm import tqdm

    lines = [(number, line) for number, line in enumerate(source, 1) if line.strip()]
    if sink is not None:
        sink.clear()
    printed = Ordered(sink or out, as_json=args.json or sink is not None)
    todo = iter(enumerate(lines))
    started = time.monotonic()
    with tqdm(total=len(lines), unit="prompt", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        async def work() -> None:
            for index, (number, line) in todo:
                row: dict[str, Any] = {}
                try:
                    row = parse_row(line, number)
                    completion = await router.generate(prompt_of(row), **sampling)
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
    simulated = "simulated: " if router.recipe.simulated else ""
    print(
        f"{simulated}{len(lines)} prompts{failed}, {printed.tokens} tokens in {seconds:.1f} s "
        f"({rate:.0f} tokens/s)",
        file=sys.stderr,
    )
    return 1 if printed.failures else 0
