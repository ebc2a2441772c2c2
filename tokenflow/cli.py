"""The command line: parses arguments and picks a command.  Heavy imports belong to the commands."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenflow.errors import RecipeError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPT = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns the exit code: 0, 1 failure, 2 usage or recipe, 130 interrupt, 128 + n for another signal.
    """
    try:
        _open_standard_files()
        _require_working_directory()
        args = _parse(argv)
        code = int(args.command(args))
        sys.stdout.flush()
        return code
    except RecipeError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        # A second Ctrl-C must not cut the way out short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("tokenflow: interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:
        # Whoever read our output has left; Python must not complain about it at exit either.
        sys.stdout = None
        return EXIT_FAILURE
    except OSError as error:
        print(f"tokenflow: {error}", file=sys.stderr)
        sys.stdout = None
        return EXIT_FAILURE


def _open_standard_files() -> None:
    """Put /dev/null where standard files are closed: sockets would take their numbers.

    To be asked for an answer and not to get rid of it is an error all the same.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
            setattr(sys, name, _Closed() if fd == 1 else os.fdopen(fd, mode, closefd=False))
    if (stderr := sys.__stderr__) is not None and sys.stderr is stderr:
        log = _Log(stderr.fileno(), "w", closefd=False)
        unbuffered = stderr.write_through
        sys.stderr = io.TextIOWrapper(
            log if unbuffered else io.BufferedWriter(log),
            stderr.encoding,
            stderr.errors,
            line_buffering=True,
            write_through=unbuffered,
        )


def _require_working_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise OSError("the working directory is gone: change to one that is there") from None


class _Log(io.FileIO):
    """Standard error: what cannot be written is lost, and the work goes on."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


class _Closed(io.TextIOBase):
    """Standard output that is closed."""

    def write(self, text: str) -> int:
        raise OSError("standard output is closed: what belongs there is lost")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse before 3.13 takes an optional positional for absent once a flag follows the recipe.
    if getattr(args, "prompt", "") is None:
        if len(rest) == 2 and rest[0] == "--":
            args.prompt, rest = rest[1], []
        elif len(rest) == 1 and (rest[0] == "-" or rest[0][:1] != "-"):
            args.prompt = rest.pop()
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenflow",
        description="Several models write one response together; a recipe picks the model for every token.",
    )
    parser.add_argument("--version", action="version", version=f"tokenflow {version('tokenflow')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        help="answer prompts with a recipe",
        description="Answer one prompt, or a file of prompts. The text goes to stdout, all else to stderr.",
    )
    _add_recipe(run)
    run.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt as is; - reads it from stdin")
    run.add_argument(
        "--chat", action="store_true", help="render PROMPT as a user message with the chat template"
    )
    run.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    run.add_argument("--trace", action="store_true", help="mark the text by the model that wrote it")
    batch = run.add_argument_group("batches")
    batch.add_argument(
        "--input",
        metavar="FILE",
        help="JSON lines with 'prompt', 'messages' or 'prompt_ids' each (the first counts); - for stdin",
    )
    batch.add_argument("--output", metavar="FILE", help="write JSON lines here instead of stdout")
    batch.add_argument("--concurrency", type=_positive, default=16, metavar="N", help="requests at once (16)")
    _add_sampling(run.add_argument_group("sampling"))
    run.set_defaults(command=_run)

    serve = commands.add_parser(
        "serve",
        help="serve a recipe over HTTP, as OpenAI's API",
        description="Serve a recipe over HTTP, as OpenAI's API. Each option has a twin in the environment: "
        "TOKENFLOW_PORT for --port.",
    )
    _add_recipe(serve)
    _add_serving(serve)
    serve.set_defaults(command=_serve)

    check = commands.add_parser(
        "check",
        help="check a recipe and describe it",
        description="Check a recipe without loading its models: what it says, and tokenizers that are here. "
        "Every problem is listed with file and line, and so is what is hardly meant (a warning).",
    )
    _add_recipe(check)
    output = check.add_mutually_exclusive_group()
    output.add_argument("--ir", action="store_true", help="print the compiled recipe as JSON")
    output.add_argument("--json", action="store_true", help="print problems and warnings as a JSON list")
    check.set_defaults(command=_check)

    plan = commands.add_parser(
        "plan",
        help="plan batch thresholds and throughput",
        description="Find the batch thresholds at which a recipe is fastest, and how fast it should be. The "
        "routing and the step latencies are those that the recipe assumes or simulates, or measured ones.",
    )
    _add_recipe(plan)
    plan.add_argument(
        "--concurrency",
        type=_concurrencies,
        required=True,
        metavar="N[,N...]",
        help="requests at a time; each is planned",
    )
    plan.add_argument(
        "--measure", action="store_true", help="run the recipe for a while and plan with what is measured"
    )
    plan.add_argument(
        "--seconds", type=_positive, default=20, metavar="S", help="how long --measure runs it (20)"
    )
    plan.add_argument(
        "--input", metavar="FILE", help="prompts for --measure, as in tokenflow run (a few of its own)"
    )
    plan.add_argument(
        "--plot", metavar="FILE", help="draw throughput against thresholds in a .png, .html or .svg file"
    )
    plan.add_argument("--json", action="store_true", help="print everything that was found as JSON")
    plan.set_defaults(command=_plan)

    graph = commands.add_parser(
        "graph",
        help="draw a recipe",
        description="Draw a recipe's models, the rules between them and what a hand-off sends.",
    )
    _add_recipe(graph)
    graph.add_argument("--mermaid", action="store_true", help="as a Mermaid flowchart, for Markdown")
    graph.set_defaults(command=_graph)

    schema = commands.add_parser(
        "schema",
        help="print the JSON Schema of recipes, for editors",
        description="Print the JSON Schema of recipe files, by which editors complete and check them.",
    )
    schema.add_argument(
        "--markdown", action="store_true", help="print it as the reference of docs/recipes.md"
    )
    schema.set_defaults(command=_schema)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a recipe file: YAML, or Python that calls its Recipe 'recipe'"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        dest="overrides",
        help="change the recipe: models.llm.path=..., params.tau=0.1 (repeatable)",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="most output tokens (what the context allows)"
    )
    group.add_argument(
        "--min-tokens", type=int, metavar="N", help="no end of sequence before this many tokens"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (0)")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens (all)")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="keep the most probable tokens of this mass (1)"
    )
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the best (0)")
    group.add_argument("--seed", type=int, metavar="N", help="repeat a sampled response")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1 discourages repeats (1)"
    )
    group.add_argument("--presence-penalty", type=float, metavar="X", help="from -2 to 2 (0)")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="from -2 to 2 (0)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after end of sequence")
    group.add_argument(
        "--logprobs",
        action="store_true",
        default=None,
        help="report log-probabilities (with --json or --output)",
    )


def _add_serving(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, metavar: str, text: str, **more: Any) -> None:
        parser.add_argument(flag, metavar=metavar, help=text, **more)

    add("--host", "HOST", "where to listen (127.0.0.1)")
    add("--port", "N", "where to listen (8000)")
    add("--uds", "PATH", "listen at a Unix socket instead")
    add("--served-model-name", "NAME", "what clients call the recipe (repeatable)", action="append")
    add("--api-key", "KEY", "ask clients for this key (repeatable)", action="append")
    add("--max-queued-reqs", "N", "most requests that wait; the others get 503 (256)")
    add("--request-timeout", "SECONDS", "most that a response may take (no limit)")
    add("--max-model-len", "N", "most tokens of a request, prompt and output (the models' own limit)")
    add("--context-length", "N", argparse.SUPPRESS, dest="max_model_len")
    add("--drain-timeout", "SECONDS", "for open requests to end in after the first signal (30)")
    add("--log-level", "LEVEL", "debug, info, warning, error (warning)")
    parser.add_argument(
        "--access-log", action="store_true", default=None, help="log every request, in a line of JSON"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    from tokenflow.run import run

    return run(args)


def _serve(args: argparse.Namespace) -> int:
    try:
        from tokenflow.server.serve import serve
    except ModuleNotFoundError as error:
        print(f"tokenflow serve: needs {error.name}: pip install 'tokenflow[serve]'", file=sys.stderr)
        return EXIT_FAILURE
    return serve(args)


def _concurrencies(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) >= 1 for number in numbers):
        raise argparse.ArgumentTypeError(
            f"must be whole numbers of at least 1, as in 4 or 1,2,4, got {text!r}"
        )
    return tuple(dict.fromkeys(map(int, numbers)))


def _plan(args: argparse.Namespace) -> int:
    from tokenflow.plan import plan

    return plan(args)


def _check(args: argparse.Namespace) -> int:
    from tokenflow.check import checked
    from tokenflow.dsl.describe import describe
    from tokenflow.dsl.ir import to_json

    try:
        recipe = checked(args.recipe, args.overrides)
    except RecipeError as error:
        if not args.json:
            raise
        print(json.dumps([asdict(problem) for problem in error.problems], indent=2))
        return EXIT_USAGE
    if args.json:
        print(json.dumps([asdict(warning) for warning in recipe.notes.warnings], indent=2))
        return EXIT_OK
    print(to_json(recipe) if args.ir else describe(recipe))
    for warning in recipe.notes.warnings:
        print(warning, file=sys.stderr)
    return EXIT_OK


def _graph(args: argparse.Namespace) -> int:
    from tokenflow.dsl.graph import mermaid, picture
    from tokenflow.dsl.load import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    print(mermaid(recipe) if args.mermaid else picture(recipe))
    return EXIT_OK


def _schema(args: argparse.Namespace) -> int:
    from tokenflow.dsl.json_schema import recipe_schema
    from tokenflow.dsl.reference import recipe_reference

    print(recipe_reference() if args.markdown else recipe_schema(), end="")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
