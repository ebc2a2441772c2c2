"""The settings of ``tokenflow serve``: flags, their twins in the environment, and defaults, in this order."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tokenflow.errors import TokenflowError
from tokenflow.settings import option


class OptionError(TokenflowError):
    """A setting of the server that means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Each field has a flag and an environment variable of its name.

    :param host: where to listen; loopback only by default.
    :param port: where to listen; 0 takes any free one.
    :param uds: listen at this Unix socket instead.
    :param served_model_name: what clients call the recipe; its own name by default.
    :param api_key: any of them opens the endpoints that make tokens.
    :param max_queued_reqs: so many requests may wait until one can begin.
    :param request_timeout: seconds that a response may take, the time in the queue included; any by default.
    :param max_model_len: most tokens of one request, prompt and output; the models' own limit by default.
    :param drain_timeout: seconds for open requests to end in after the first signal.
    :param log_level: level of the log on stderr.
    :param access_log: log every request, in a line of JSON.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    max_queued_reqs: int = 256
    request_timeout: float | None = None
    max_model_len: int | None = None
    drain_timeout: float = 30.0
    log_level: str = "warning"
    access_log: bool = False

    def changed(self) -> dict[str, Any]:
        """What is not as it is by default, without secrets."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {
            name: "***" if name == "api_key" else value
            for name, (value, default) in values.items()
            if value != default
        }


def options(args: argparse.Namespace) -> Options:
    """What the command line and the environment say.

    :raises OptionError: for a value that means nothing; it names the flag and the variable.
    """
    found: dict[str, Any] = {}
    for name, read in _READERS.items():
        flag, given = f"--{name.replace('_', '-')}", getattr(args, name)
        where, texts = flag, given if isinstance(given, list) else [given]
        if given is None:
            variable = option(name.upper())
            if variable is None:
                continue
            where, texts = f"TOKENFLOW_{name.upper()}", variable.split() if name in _LISTS else [variable]
        try:
            values = [read(text) for text in texts]
        except ValueError as error:
            raise OptionError(f"{where} {error}") from None
        found[name] = tuple(values) if name in _LISTS else values[0]
    return Options(**found)


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            upper = f" to {most}" if most < 2**31 - 1 else " or more"
            raise ValueError(f"must be a whole number of {least}{upper}, got {text!r}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"must be a number of seconds of at least 0, got {text!r}")
    return value


def _duration(text: str) -> float:
    if not (value := _seconds(text)):
        raise ValueError(f"must be a number of seconds above 0, got {text!r}")
    return value


def _level(text: str) -> str:
    if text.upper() not in logging.getLevelNamesMapping():
        known = ", ".join(name.lower() for name in logging.getLevelNamesMapping())
        raise ValueError(f"must be one of {known}, got {text!r}")
    return text.lower()


def _flag(text: str | bool) -> bool:
    if isinstance(text, bool):
        return text
    if text.lower() not in {"1", "true", "yes", "on", "0", "false", "no", "off"}:
        raise ValueError(f"must be true or false, got {text!r}")
    return text.lower() in {"1", "true", "yes", "on"}


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


_READERS: dict[str, Callable[[Any], Any]] = {
    "host": _text,
    "port": _whole(0, 65535),
    "uds": _text,
    "served_model_name": _text,
    "api_key": _text,
    "max_queued_reqs": _whole(0),
    "request_timeout": _duration,
    "max_model_len": _whole(1),
    "drain_timeout": _seconds,
    "log_level": _level,
    "access_log": _flag,
}
_LISTS = frozenset(("served_model_name", "api_key"))
"""Options that may be repeated; in the environment, words."""
