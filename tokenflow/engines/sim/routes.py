"""Where simulated requests go: by given shares of steps, or as in recorded responses.

A route depends on the request's seed and the output position only, so that one seed repeats one route
whatever else runs, in whatever batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from tokenflow.errors import ModelLoadError
from tokenflow.random import uniform
from tokenflow.wire.messages import Destination, Hello, Open

_ROUTE = "route"  # what the random numbers of this module are for


class Visit(NamedTuple):
    """What one step decides: where the request goes (None to stay), and whether its token is the last."""

    to: Destination | None
    last: bool = False


class Routes(Protocol):
    """Decides for one simulated model."""

    def visit(self, request: Open, position: int) -> Visit:
        """What the step that samples output position ``position`` of a request decides."""


def load_routes(hello: Hello) -> Routes:
    """The routes that a recipe gives a model; :raises ModelLoadError: for a trace that does not fit it."""
    if not hello.config.trace:
        return Drawn(hello.code, hello.destinations)
    return Recorded(hello.model, hello.destinations, read_trace(Path(hello.config.trace)))


class Drawn:
    """Each step goes to each destination with a probability of its own, independently."""

    def __init__(self, code: int, destinations: Sequence[Destination]) -> None:
        self._code = code
        self._destinations = destinations

    def visit(self, request: Open, position: int) -> Visit:
        """See :class:`Routes`."""
        number = uniform(request.seed, request.sampling.choice, position, self._code, _ROUTE)
        shares = (
            destination.share if destination.param < 0 else request.params[destination.param]
            for destination in self._destinations
        )
        for destination, end in zip(self._destinations, accumulate(shares), strict=True):
            if number < end:
                return Visit(destination)
        return Visit(None)


class Recorded:
    """Request with seed s repeats response s of the trace, modulo their number: who wrote each token.

    Where the next writer can be reached by a rule that keeps the token, the request goes there with the token
    before; otherwise it goes there from the token's own position, which it gives up.

    :raises ModelLoadError: for a change of writers that no rule of this model makes.
    """

    def __init__(
        self, model: str, destinations: Sequence[Destination], trace: Sequence[Sequence[str]]
    ) -> None:
        self._model = model
        self._destinations = {destination.name: destination for destination in destinations}
        self._trace = trace
        for index, writers in enumerate(trace):
            for here, after in pairwise(writers):
                if here == model != after and after not in self._destinations:
                    raise ModelLoadError(
                        f"response {index} of the trace goes from {model!r} to {after!r}, but no rule of "
                        f"{model!r} leads there"
                    )

    def visit(self, request: Open, position: int) -> Visit:
        """See :class:`Routes`."""
        writers = self._trace[(request.seed + request.sampling.choice) % len(self._trace)]
        last = position >= len(writers) - 1
        if position < len(writers) and writers[position] != self._model:
            return Visit(self._destinations.get(writers[position]))
        follower = None if last else self._destinations.get(writers[position + 1])
        return Visit(follower if follower is not None and follower.keep else None, last)


def read_trace(path: Path) -> list[list[str]]:
    """Who wrote each token of each response, from a file that ``tokenflow run --output`` wrote.

    :raises ModelLoadError: if the file is something else, or holds no response.
    """
    trace, number = [], 1
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007 (for the message)
                row = json.loads(line)
                if "error" not in row:
                    trace.append([str(token["model"]) for token in row["tokens"]])
    except OSError as error:
        raise ModelLoadError(f"the trace {path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"{path}:{number}: expected a line that tokenflow run --output wrote, with the model of every "
            f"token: {error!r}"
        ) from None
    trace = [writers for writers in trace if writers]
    if not trace:
        raise ModelLoadError(f"the trace {path} holds no response")
    return trace
