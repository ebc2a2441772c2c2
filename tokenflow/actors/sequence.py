"""One request's truth: its token ids, who wrote them, and where it is.

A worker's KV cache is only a cache of this.  Committing a token is the one event on which everything else
advances: penalties, stop strings, end of sequence, usage, log-probabilities.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Protocol

from tokenflow.errors import TokenflowError
from tokenflow.types import FinishReason, SamplingParams
from tokenflow.wire.messages import RowDone


class Phase(enum.Enum):
    """Where a request is in its life."""

    QUEUED = enum.auto()
    """Waits for memory; no worker need hold anything of it."""
    ACTIVE = enum.auto()
    """Admitted: waiting or running at its holder, pending everywhere else."""
    FINISHED = enum.auto()
    """Completed, failed or aborted; final."""


class Listener(Protocol):
    """Who asked for the response."""

    def committed(self, token: int) -> bool:
        """A token was committed that is not a stop token; answers whether its text ends the response."""

    def wake(self, sequence: Sequence) -> None:
        """There is news: tokens, or the end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a response ends: after ``max_tokens`` output tokens, or at one of ``stop_ids``."""

    max_tokens: int
    stop_ids: frozenset[int]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request as its actors see it.

    ``id`` is internal and rises with submission, so a larger one is younger.  ``tokens`` holds the prompt
    and the committed output; ``writers`` the model code of each output token, and ``logprobs`` and
    ``tops`` what was reported for it.  ``epoch`` rises whenever the request is rebuilt, which makes
    answers to earlier steps recognisably stale.  ``holder`` is the code of the model whose turn it is and
    ``arrived`` the output length when it got there.  ``seen`` maps a model code to how many leading
    tokens that model has been told of.  ``gave_up`` are the codes that dropped a token at the current
    position.
    """

    id: int
    tokens: list[int]
    sampling: SamplingParams
    seed: int
    params: tuple[float, ...]
    limits: Limits
    listener: Listener
    holder: int
    prompt_tokens: int = 0
    writers: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    phase: Phase = Phase.QUEUED
    epoch: int = 0
    arrived: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    gave_up: set[int] = field(default_factory=set)
    handoffs: int = 0
    dropped: int = 0
    finish_reason: FinishReason | None = None
    error: TokenflowError | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def output_tokens(self) -> int:
        """How many output tokens are committed."""
        return len(self.writers)

    @property
    def run_length(self) -> int:
        """Tokens committed by the holder since the request came to it."""
        return len(self.writers) - self.arrived

    def commit(self, code: int, done: RowDone) -> FinishReason | None:
        """Append the token that model ``code`` sampled; answers why the response ends now, if it does."""
        token = done.token
        self.tokens.append(token)
        self.writers.append(code)
        self.logprobs.append(done.logprob)
        self.tops.append(done.top)
        self.gave_up.clear()
        if not self.first_token_at:
            self.first_token_at = time.monotonic()
        if token in self.limits.stop_ids or self.listener.committed(token):
            return "stop"
        return "length" if len(self.writers) >= self.limits.max_tokens else None

    def move(self, code: int) -> None:
        """Hand the turn to model ``code``."""
        self.seen[self.holder] = self.seen[code] = len(self.tokens)
        self.holder = code
        self.arrived = len(self.writers)
        self.handoffs += 1

    def end(self, reason: FinishReason | None, error: TokenflowError | None) -> None:
        """The request is over, completed or failed; final."""
        self.phase = Phase.FINISHED
        self.finish_reason = reason
        self.error = error
        self.finished_at = time.monotonic()
        self.listener.wake(self)
