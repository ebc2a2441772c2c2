"""Where recipes come from: YAML text as plain data that knows the line and column of every key and value.

The YAML read here is the core schema of version 1.2, less its surprises: only ``true`` and ``false`` are
booleans, ``1e-3`` is a number, a leading zero makes no number at all, keys are always text, duplicate
keys are errors, and there are no tags and no merge keys.  Anchors and aliases work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import yaml
from yaml.scanner import Scanner

from tokenflow.dsl.ir import PythonIR
from tokenflow.dsl.wording import Path, closest, key_path, printable, show
from tokenflow.errors import Problem, RecipeError
from tokenflow.numeric import plain

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a key or a value was written.

    ``line`` and ``column`` count from 1; line 0 means that there is none (a command line override, a
    mapping).  ``folders`` are where relative model paths are looked up, best first.
    """

    file: str
    folders: tuple[FilePath, ...]
    line: int = 0
    column: int = 0
    scalar: yaml.ScalarNode | None = None


@dataclass(slots=True)
class Document:
    """A recipe as plain data, the spots of its keys and values, and the problems found so far.

    ``python`` holds what else is said of a model, in Python.
    """

    data: dict[str, Any]
    keys: dict[Path, Spot] = field(default_factory=dict)
    values: dict[Path, Spot] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    python: dict[str, PythonIR] = field(default_factory=dict)

    def spot(self, path: Path) -> Spot:
        """Where the value at ``path`` was written, or the nearest value around it."""
        while path not in self.values:
            path = path[:-1]
        return self.values[path]

    def spots(self) -> dict[Path, tuple[str, int, int]]:
        """File, line and column of every value; of models and heads, of their names."""
        named = {path: spot for path, spot in self.keys.items() if path[:-1] in (("models",), ("heads",))}
        spots = {**self.values, **named}
        return {path: (spot.file, spot.line, spot.column) for path, spot in spots.items()}

    def report(self, path: Path, message: str, *, at_key: bool = False, offset: int | None = None) -> None:
        """Note a problem with the value at ``path``, with its key, or with one character of its text."""
        spot = self.keys[path] if at_key and path in self.keys else self.spot(path)
        line, column = spot.line, spot.column
        if offset is not None:
            if spot.scalar is not None:
                line, column = _position(spot.scalar, offset)
            else:
                message = f"column {offset + 1}: {message}"
        self.note(replace(spot, line=line, column=column), path, message)

    def note(self, spot: Spot, path: Path, message: str) -> None:
        """Note a problem at a spot; the names that a message quotes cannot break its line."""
        problem = Problem(spot.file, spot.line, spot.column, key_path(path), printable(message))
        self.problems.append(problem)

    def ends_at_comma(self, path: Path) -> bool:
        """Whether the value at ``path`` is unquoted text that a comma ends."""
        scalar = self.spot(path).scalar
        if scalar is None or scalar.style is not None:
            return False
        buffer = scalar.end_mark.buffer
        return buffer is not None and buffer[scalar.end_mark.pointer :].lstrip().startswith(",")

    def put(self, path: Path, value: object, spot: Spot) -> None:
        """Replace the value at ``path``, whose surroundings exist, by one written at ``spot``."""
        container: Any = self.data
        for key in path[:-1]:
            container = container[key]
        container[path[-1]] = value
        for spots in (self.keys, self.values):
            for inner in [p for p in spots if p[: len(path)] == path]:
                del spots[inner]
            spots[path] = spot


def read_file(path: str | os.PathLike[str]) -> Document:
    """Read a recipe file.

    :raises RecipeError: if the file cannot be read, is not YAML, or holds no mapping.
    """
    name = os.fspath(path)
    text = _read_text(name)
    spot = Spot(name, (FilePath(name).absolute().parent,))
    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
        raise RecipeError([Problem(name, line, column, "", f"not YAML: {_yaml_problem(error)}")]) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        message = f"not YAML: character U+{error.character:04X} is not allowed"
        raise RecipeError([Problem(name, line, column, "", message)]) from None
    except RecursionError:
        raise _unreadable(name, "nested too deeply") from None
    if node is None:
        raise _unreadable(name, "the recipe is empty")
    builder = _Builder(Document({}), spot)
    data = builder.build(node, ())
    document = builder.document
    if not isinstance(data, dict):
        document.report((), f"expected a mapping with the keys of a recipe, got {show(data)}")
        raise RecipeError(document.problems)
    document.data = data
    return document


def read_mapping(recipe: Mapping[Any, Any]) -> Document:
    """Take a recipe that is data already; its model paths are relative to the current directory."""
    document = Document({})
    document.values[()] = Spot("<recipe>", (FilePath.cwd(),))
    document.data = _plain_mapping(document, recipe, ())
    return document


def no_such_file(name: str) -> RecipeError:
    """The error for a recipe file that does not exist, with the name of one beside it that does."""
    missing = FilePath(name)
    files = [path for path in missing.parent.glob("*.*") if path.suffix in (".yaml", ".py")]
    files.sort(key=lambda path: (path.suffix == missing.suffix, path))
    siblings = {path.stem: str(path) for path in files}
    near = closest(missing.stem, siblings)
    hint = f' (did you mean "{siblings[near]}"?)' if near is not None else ""
    return _unreadable(name, f"no such file{hint}")


def read_value(text: str) -> object:
    """Read one YAML value, as in ``--set key=value``.

    :raises ValueError: if it is not one YAML value; the message says why.
    """
    try:
        node = _compose(text)
        if node is None:
            return None
        builder = _Builder(Document({}), Spot("", ()))
        value = builder.build(node, ())
    except yaml.MarkedYAMLError as error:
        raise ValueError(_yaml_problem(error)) from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"character U+{error.character:04X} is not allowed") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if builder.document.problems:
        raise ValueError(builder.document.problems[0].message)
    return value


def plain_scalar(text: str) -> object:
    """The value of unquoted text: nothing, a boolean, a number, or the text itself."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _WHOLE.fullmatch(text):
        return int(text)
    if _PREFIXED.fullmatch(text):
        return int(text, 0)
    if _REAL.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf"))
    return float("nan") if text in (".nan", ".NaN", ".NAN") else text


_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]{0,39})")
_PREFIXED = re.compile(r"0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_REAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)")


_PREFIX = re.compile(r"[&!]\S*\s*")  # an anchor or a tag before a value


def _read_text(name: str) -> str:
    try:
        if FilePath(name).is_dir():
            raise _unreadable(name, "is a directory, not a recipe file")
        with FilePath(name).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise no_such_file(name) from None
    except (OSError, ValueError) as error:
        raise _unreadable(name, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise _unreadable(name, "is larger than 1 MiB: not a recipe file")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        lines = raw[: error.start].decode("utf-8-sig").split("\n")
        message = f"not YAML: not UTF-8 text (byte {error.start})"
        raise RecipeError([Problem(name, len(lines), len(lines[-1]) + 1, "", message)]) from None


def _unreadable(name: str, message: str) -> RecipeError:
    return RecipeError([Problem(name, 0, 0, "", message)])


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    return ": ".join(" ".join(part.split()) for part in (error.context, error.problem) if part)


class _Loader(yaml.SafeLoader):
    """Composes nodes whose tags say only how they were written; the core schema is applied later."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return "plain" if implicit[0] else "text"
        return "container"


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


@dataclass(slots=True)
class _Builder:
    """Turns YAML nodes to plain data and fills the spots of a document."""

    document: Document
    origin: Spot
    count: int = 0
    inside: list[int] = field(default_factory=list)

    def build(self, node: yaml.Node, path: Path) -> object:
        self.count += 1
        self.document.values[path] = self._spot(node)
        if self.count > MAX_VALUES or len(self.inside) > MAX_DEPTH:
            if self.count <= MAX_VALUES + 1:
                self.count = MAX_VALUES + 2
                self.document.report(path, "the recipe is too large or nested too deeply")
            return None
        if id(node) in self.inside:
            self.document.report(path, "an alias inside the value that it stands for")
            return None
        if node.tag not in ("plain", "text", "container"):
            self.document.report(path, f"YAML tags are not supported, got {show(node.tag)}")
        if isinstance(node, yaml.ScalarNode):
            return plain_scalar(node.value) if node.tag == "plain" else node.value
        self.inside.append(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._list(node, path)
        self.inside.pop()
        return value

    def _list(self, node: yaml.Node, path: Path) -> list[object]:
        return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            spot = self._spot(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.document.note(spot, path, "a key must be plain text")
                continue
            inner = (*path, key_node.value)
            if key_node.value == "<<" and key_node.tag == "plain":
                self.document.note(spot, inner, "merge keys are not supported: repeat the keys")
            elif key_node.value in result:
                first = self.document.keys[inner].line
                where = f"lines {first} and {spot.line}" if first != spot.line else f"twice on line {first}"
                self.document.note(spot, inner, f"duplicate key ({where})")
            else:
                self.document.keys[inner] = spot
                result[key_node.value] = self.build(value_node, inner)
        return result

    def _spot(self, node: yaml.Node) -> Spot:
        mark = node.start_mark
        scalar = node if isinstance(node, yaml.ScalarNode) else None
        return Spot(self.origin.file, self.origin.folders, mark.line + 1, mark.column + 1, scalar)


def _plain(document: Document, value: object, path: Path) -> object:
    if isinstance(value, Mapping):
        return _plain_mapping(document, value, path)
    if isinstance(value, list | tuple):
        return [_plain(document, inner, (*path, index)) for index, inner in enumerate(value)]
    return plain(value)


def _plain_mapping(document: Document, value: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)  # as YAML has it
        if isinstance(key, str):
            plain[key] = _plain(document, inner, (*path, key))
        else:
            document.report(path, f"a key must be text, got {show(key)}")
    return plain


def _position(node: yaml.ScalarNode, offset: int) -> tuple[int, int]:
    """Line and column, from 1, of the character at ``offset`` of a scalar's value.

    Quotes, escapes, folded lines and indentation make text and value differ, but never in the order of
    the characters that are not white space; so those are counted.
    """
    text, at, end = node.start_mark.buffer, node.start_mark.pointer, node.end_mark.pointer
    assert text is not None
    while (prefix := _PREFIX.match(text, at)) is not None:
        at = prefix.end()
    style = node.style or ""
    if style in ("|", ">"):
        at = text.index("\n", at) + 1
    elif style in ("'", '"'):
        at, end = at + 1, end - 1
    left = sum(not char.isspace() for char in node.value[:offset])
    last = at
    while at < end:
        length, char = _character(text, at, style)
        if char and not char.isspace():
            if left == 0:
                break
            left -= 1
            last = at + length
        at += length
    else:
        at = last
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def _character(text: str, at: int, style: str) -> tuple[int, str]:
    """How long one character of the value is in the text, and what it is; a joined line end is none."""
    if style == "'" and text.startswith("''", at):
        return 2, "'"
    if style == '"' and text[at] == "\\":
        code = text[at + 1]
        if code == "\n":
            return 2, ""
        digits = Scanner.ESCAPE_CODES.get(code, 0)
        if digits:
            return 2 + digits, chr(int(text[at + 2 : at + 2 + digits], 16))
        return 2, Scanner.ESCAPE_REPLACEMENTS[code]
    return 1, text[at]
