"""Rows of a batch: JSON lines in, JSON lines out, in the same order."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

from tokenflow.errors import InvalidRequest, RequestError
from tokenflow.prompts import Prompt
from tokenflow.types import Completion

_PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
_OUTPUT_KEYS = frozenset(
    ("index", "prompt", "text", "finish_reason", "tokens", "usage", "timing", "simulated", "error")
)


def open_rows(path: str) -> TextIO:
    """The input file, or stdin for ``-``; bytes that are no UTF-8 fail the row they are in, not the file.

    :raises OSError: if it cannot be read.
    """
    file = sys.stdin.fileno() if path == "-" else Path(path)
    return open(file, encoding="utf-8-sig", errors="surrogateescape", closefd=path != "-")


class RowFile:
    """A file to write rows to; a regular file gets each of them as a whole or not at all.

    What it held before stays until :meth:`clear`.

    :raises OSError: if it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (closed by its own context)
        self._regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._whole = self._rows = 0

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def clear(self) -> None:
        """Drop what it holds."""
        if self._regular:
            self._file.truncate(0)

    def write(self, text: str) -> None:
        """Write a row, its line end included.

        :raises OSError: if there is no room for all of it: a beginning is taken back, and the error says so.
        """
        row = text.encode()
        rest = memoryview(row)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {self._path}{self._kept()}") from None
        self._whole += len(row)
        self._rows += 1

    def flush(self) -> None:
        """Nothing waits here."""

    def _kept(self) -> str:
        if not self._regular:
            return ""
        try:
            self._file.truncate(self._whole)
        except OSError as error:
            return f" ends in the middle of a row ({error.strerror})"
        return f" has the first {self._rows} rows, each of them whole"


class Sink(Protocol):
    """What rows are written to."""

    def write(self, text: str, /) -> object:
        """Take a row."""

    def flush(self) -> object:
        """Write what waits."""


class Ordered:
    """Writes rows in the order of the input, each as soon as those before it are there."""

    def __init__(self, sink: Sink, as_json: bool) -> None:
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
        with suppress(OSError):  # the output says it as well
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
        self._sink.flush()

    def _take(self) -> Iterator[str]:
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next += 1


def parse_row(line: str, number: int) -> dict[str, Any]:
    """An input row; :raises InvalidRequest: if the line is not a JSON object with a prompt."""
    try:
        row = json.loads(line, parse_constant=_no_constant)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        # It could not be written again.
        found = error.object[error.start]
        raise InvalidRequest(
            f"line {number} is not UTF-8, or spells half a surrogate pair: {found!r}", "prompt"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"line {number} is not JSON: {error}", "prompt") from None
    if not isinstance(row, dict) or not any(row.get(key) is not None for key in _PROMPT_KEYS):
        raise InvalidRequest(f"line {number} has none of the keys {', '.join(_PROMPT_KEYS)}", "prompt")
    return row


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is a number in JavaScript only")


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """The prompt of an input row, by the first of its keys.

    :raises InvalidRequest: if it is of the wrong kind.
    """
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
        "prompt": prompt_of(row),
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
        **({"simulated": True} if completion.simulated else {}),
    }
