"""The tokens of an expression: what may stand where, and what its texts mean.

Done here, and not left to the syntax errors of :mod:`ast`, so that messages and columns are our own.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tokenflow.dsl.wording import show

UNCLOSED = "is never closed"
"""How the faults end that a comma inside a YAML flow mapping causes, too."""

MAX_LENGTH = 2000
MAX_DEPTH = 64
MAX_WHOLE = 2**63 - 1
MAX_REAL = 3.4028234663852886e38
"""The largest finite float32: signals and parameters are float32."""


class Fault(NamedTuple):
    """Something wrong with an expression, at a character offset (from 0) of its text."""

    offset: int
    message: str


class ExpressionError(Exception):
    """An expression is wrong; ``faults`` lists what was found.  Recipe errors are made of it."""

    def __init__(self, faults: Collection[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(f"column {offset + 1}: {message}" for offset, message in self.faults))


class Scanned(NamedTuple):
    """An expression that has only known tokens, each where it can stand.

    ``line`` is the expression on one line.  ``blank`` is the same with spaces for what its texts say, hence
    plain ASCII; ``texts`` has their meaning by the offset of the opening quote.
    """

    line: str
    blank: str
    texts: Mapping[int, str]


def scan(text: str) -> Scanned:
    """Cut an expression into tokens.

    :raises ExpressionError: with everything that no expression may contain, or else the first token that
        stands where it cannot.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError([Fault(MAX_LENGTH, f"longer than {MAX_LENGTH} characters")])
    line = re.sub(r"\s", " ", text)
    end = len(line.rstrip())
    if not end:
        raise ExpressionError([Fault(0, "the expression is empty")])
    matches = ((match.lastgroup or "", match) for match in _TOKEN.finditer(line, 0, end))
    tokens = [(form, match.start(form), match.end(form)) for form, match in matches]
    texts: dict[int, str] = {}
    blank = line
    foreign: list[Fault] = []
    for form, start, stop in tokens:
        if form == "text":
            texts[start] = _meaning(text[start + 1 : stop - 1], start + 1, foreign)
            blank = f"{blank[: start + 1]}{' ' * (stop - start - 2)}{blank[stop - 1 :]}"
        elif fault := _foreign(form, line[start:stop]):
            foreign.append(Fault(start, fault))
            if line[start] in _QUOTES:
                break
    placed = [(form, line[start:stop], start) for form, start, stop in tokens]
    if faults := foreign or _misplaced(placed, end):
        raise ExpressionError(faults)
    return Scanned(line, blank, texts)


def unexpected(line: str, at: int) -> Fault:
    """What to say of the token at an offset."""
    match = _TOKEN.match(line, at)
    return Fault(at, f"unexpected {show(match[0].strip() if match else line)}")


def too_deep(at: int) -> Fault:
    """What to say where brackets or operators are nested too deeply."""
    return Fault(at, f"nested deeper than {MAX_DEPTH} levels")


_QUOTES = ("'", '"')
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\w*)
    | (?P<word>[^\W\d]\w*)
    | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<attribute>\.\s*[^\W\d]\w*)
    | (?P<symbol>\*\*|//|<<|>>|&&|\|\||===|==|!=|<=|>=|=>|=<|<>|:=|\S)
    )""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", '"': '"', "'": "'"}
_INFIX = frozenset({"+", "*", "/", "%", "<", "<=", ">", ">=", "==", "!=", "and", "or"})
_FOREIGN = frozenset({*keyword.kwlist, "is"} - {"and", "or", "not"})
_INSTEAD = {
    "&&": "and",
    "&": "and",
    "||": "or",
    "|": "or",
    "!": "not",
    "~": "not",
    "=": "==",
    "===": "==",
    "is": "==",
    "<>": "!=",
    "=>": ">=",
    "=<": "<=",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "−": "-",
    "×": "*",
    "//": "/",
    "True": "true",
    "False": "false",
}


def _meaning(quoted: str, start: int, faults: list[Fault]) -> str:
    """What a text says, its escapes read; faults are added."""

    def character(match: re.Match[str]) -> str:
        code, escaped = match.groups()
        if code is not None:
            return chr(int(code, 16))
        if escaped not in _ESCAPES:
            known = r"\n \t \r \b \f \\ \" \' \uXXXX"
            faults.append(Fault(start + match.start(), f"unknown escape {show(match[0])} (known: {known})"))
        return _ESCAPES.get(escaped, "")

    # Two escapes may be the halves of one character.
    said = _ESCAPE.sub(character, quoted).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if "\ufffd" in said and "\ufffd" not in quoted:
        faults.append(Fault(start - 1, "a text with half a surrogate pair"))
    return said


def _misplaced(tokens: Collection[tuple[str, str, int]], end: int) -> list[Fault]:
    """The first token that stands where it cannot, if there is one."""
    opened: list[tuple[int, bool]] = []
    previous, operand_next = "", True
    for form, token, at in tokens:
        if token == ")" and not opened:
            return [Fault(at, '")" without "("')]
        if token == "," and not (opened and opened[-1][1]):
            return [Fault(at, 'unexpected ","')]
        if token == "(" and len(opened) == MAX_DEPTH:
            return [too_deep(at)]
        if not _fits(token, previous, operand_next):
            return [Fault(at, f"unexpected {show(token)}")]
        call = token == "(" and previous == "name"
        if token == "(":
            opened.append((at, call))
        elif token == ")":
            opened.pop()
        operand_next = token in _INFIX or token in ("-", "not", ",", "(")
        previous = "call" if call else "name" if form == "word" and not operand_next else ""
    if opened:
        return [Fault(opened[-1][0], f'"(" {UNCLOSED}')]
    return [Fault(end, "the expression ends where a value is missing")] if operand_next else []


def _fits(token: str, previous: str, operand_next: bool) -> bool:
    if token == "-" or (token == "(" and previous == "name") or (token == ")" and previous == "call"):
        return True
    return operand_next != (token in _INFIX or token in (",", ")"))


def _foreign(form: str, token: str) -> str | None:
    if form == "number":
        if not _NUMBER.fullmatch(token):
            return f"malformed number {show(token)}"
        return None if float(token) <= MAX_REAL else f"number out of range: {show(token)}"
    if form == "attribute":
        return f"attributes are not supported, got {show(token)}"
    if token in _QUOTES:
        return f"{show(token)} {UNCLOSED}"
    if (form == "word" and (token in _FOREIGN or not token.isascii())) or (
        form == "symbol" and token not in _INFIX and token not in ("-", ",", "(", ")")
    ):
        hint = f' (did you mean "{_INSTEAD[token]}"?)' if token in _INSTEAD else ""
        return f"{show(token)} is not supported{hint}"
    return None
