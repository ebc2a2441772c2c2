"""Code that travels by reference: definitions named by file and qualified name, imported where they run.

A file is imported by itself under a private module name that depends on its text, so an edited file is
another module.  The file's folder is not searched for what it imports: that is installed, or stands in the
file.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

_LONGEST_TEXT = 500
"""Characters of what an error says about itself."""

_importing: list[str] = []
_lock = threading.RLock()


class ImportFailed(Exception):
    """A file or a definition in it cannot be had; ``line`` and ``column`` are 0 where there is none."""

    def __init__(self, file: str, line: int, column: int, message: str) -> None:
        self.file = file
        self.line = line
        self.column = column
        self.message = message
        super().__init__(f"{file}:{line}: {message}" if line else f"{file}: {message}")


def import_file(file: str, text: bytes | None = None) -> ModuleType:
    """Import a Python file, once as long as its text stays the same; threads wait for each other.

    :param text: what the file held when it was looked at; without it, it is read now.
    :raises ImportFailed: if it cannot be read, is not Python, or raises; a failed import leaves nothing.
    """
    with _lock:
        return _import(file, text)


def _import(file: str, text: bytes | None) -> ModuleType:
    path = str(Path(file).resolve())
    try:
        text = Path(path).read_bytes() if text is None else text
    except OSError as error:
        raise ImportFailed(file, 0, 0, f"cannot be read: {error.strerror or error}") from None
    name = f"tokenflow_recipe_{blake2b(path.encode() + text, digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    try:
        code = compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ImportFailed(file, error.lineno or 0, error.offset or 0, f"not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ImportFailed(file, 0, 0, f"not Python: {error or 'nested too deeply'}") from None
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    _importing.append(path)
    try:
        # Standard output belongs to the responses.
        with redirect_stdout(sys.stderr):
            exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ImportFailed(file, line_of(error, path), 0, _import_fault(error, path)) from error
    finally:
        _importing.pop()
    return module


def find(file: str, name: str, text: bytes | None = None) -> Any:
    """The definition with a qualified name, ``function`` or ``Class.method``, in a file.

    :param text: as for :func:`import_file`.
    :raises ImportFailed: if the file cannot be imported or has no such name.
    """
    value: Any = import_file(file, text)
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise ImportFailed(file, 0, 0, f"has no {name!r} at its top level") from None
    return value


def importing() -> str:
    """The file that :func:`import_file` is running at the moment, empty if there is none."""
    return _importing[-1] if _importing else ""


def keywords(function: Callable[..., Any], names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that a function takes by name, after its first parameter."""
    first, *rest = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in rest)
    taken = {parameter.name for parameter in rest}
    return tuple(name for name in names if name in taken or (takes_all and name != first.name))


def place(function: Callable[..., Any]) -> str:
    """``name, file:line`` of a function or method."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    where = f", {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(inner, '__qualname__', inner)}{where}"


def failure(error: BaseException, file: str) -> str:
    """``raised KeyError at line 12: 'x'``: what code of ``file`` did instead of giving an answer."""
    line = line_of(error, file)
    at = f" at line {line}" if line else ""
    return f"raised {type(error).__name__}{at}" + _because(error)


def _because(error: BaseException) -> str:
    """What an error says, on one line that can be read; an error that cannot even be printed says nothing."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        return ""
    return f": {text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + '...'}" if text else ""


def line_of(error: BaseException, file: str) -> int:
    """The innermost line of ``file`` that an error passed through; 0 if there is none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    return lines[-1] if lines else 0


def _import_fault(error: BaseException, path: str) -> str:
    text = f"raised {type(error).__name__}" + _because(error)
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return text
    beside = Path(path).parent / error.name.partition(".")[0]
    if not (beside.is_dir() or beside.with_suffix(".py").is_file()):
        return text
    return text + " (the file's folder is not searched: install the module, or put it into the file)"
