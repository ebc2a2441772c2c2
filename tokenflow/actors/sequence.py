"""One request's truth: its token ids, who wrote them, and where it is.

A worker's KV cache is only a cache of this.  Committing a token is the one event on which everything else
advances: penalties, stop strings, end of sequence, usage, log-probabilities.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tokenflow.actors.steps import StepEnd
from tokenflow.errors import ContextTooLong, TokenflowError
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
    """When a response ends: after ``max_tokens`` output tokens, or at one of ``stop_ids``.

    After ``timeout_s`` seconds, if there are any, the request fails.
    """

    max_tokens: int
    stop_ids: frozenset[int]
    timeout_s: float | None = None

    @classmethod
    def within(
        cls,
        longest: int,
        prompt_tokens: int,
        sampling: SamplingParams,
        eos_token_ids: Iterable[int],
        timeout_s: float | None,
    ) -> Limits:
        """The limits of a request whose prompt and output may have ``longest`` tokens together.

        :raises ContextTooLong: if the prompt leaves no room for what is asked.
        """
        room = longest - prompt_tokens
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {prompt_tokens} tokens, but the recipe's smallest context or KV cache holds "
                f"{longest}, one of them for the response",
                "prompt",
            )
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            raise ContextTooLong(
                f"the prompt's {prompt_tokens} tokens and max_tokens {sampling.max_tokens} exceed the "
                f"recipe's smallest context or KV cache of {longest}; at most {room} tokens can follow",
                "max_tokens",
            )
        if sampling.min_tokens > room:
            raise ContextTooLong(
                f"min_tokens {sampling.min_tokens} exceeds what fits after the prompt, {room} tokens",
                "min_tokens",
            )
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(eos_token_ids)
        return cls(sampling.max_tokens or room, frozenset(stop_ids), timeout_s)


@dataclass(eq=False, slots=True)
class Sequence:
    """A request as its actors see it.

    ``id`` is internal and rises with submission, so a larger one is younger.  ``tokens`` holds the prompt
    and the committed output; ``writers`` the model code of each output token, ``written`` their counts,
    ``logprobs`` and ``tops`` what was reported for them.  The first ``final`` output tokens are final:
    shown, billed, able to end the response.  In a recipe with ``rollback`` the rest is tentative and may
    be taken back; without, there is no rest.  ``step_end`` is where a step ends, if no more than the last
    step is tentative.  ``epoch`` rises whenever the request is rebuilt, which makes answers to earlier steps
    recognisably stale.  ``holder`` is the code of the model whose turn it is and ``arrived`` the output
    length when it got there.  ``seen`` maps a model code to how many leading tokens that model has been told
    of, ``states`` to what its rules' windows and momentums hold.  ``gave_up`` holds who dropped a token at
    which output position, as pairs of code and position, and ``taken_back`` is how many tokens were, since
    one last became final.  ``deaths`` is how many workers died while they ran the request, since one last
    completed a step of it.  ``booked`` is how many tokens memory is booked for ahead.  Where ``only`` is the
    code of a model, no other may write.
    """

    id: int
    tokens: list[int]
    sampling: SamplingParams
    seed: int
    params: tuple[float, ...]
    limits: Limits
    listener: Listener
    holder: int
    rollback: int = 0
    only: int = 0
    step_end: StepEnd | None = None
    prompt_tokens: int = 0
    writers: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    written: Counter[int] = field(default_factory=Counter)
    final: int = 0
    booked: int = 0
    phase: Phase = Phase.QUEUED
    epoch: int = 0
    arrived: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    states: dict[int, tuple[float, ...]] = field(default_factory=dict)
    gave_up: set[tuple[int, int]] = field(default_factory=set)
    taken_back: int = 0
    deaths: int = 0
    handoffs: int = 0
    dropped: int = 0
    finish_reason: FinishReason | None = None
    error: TokenflowError | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    def runs(self, code: int, epoch: int) -> bool:
        """Whether what model ``code`` says of an epoch holds: it is not over, not rebuilt, and there."""
        return self.phase is Phase.ACTIVE and self.epoch == epoch and self.holder == code

    @property
    def output_tokens(self) -> int:
        """How many output tokens are committed, tentative ones included."""
        return len(self.writers)

    @property
    def tentative(self) -> int:
        """How many of the last tokens may still be taken back."""
        return len(self.writers) - self.final

    @property
    def window_full(self) -> bool:
        """Whether the next token would make one final that is tentative now, unless it is checked before."""
        if not self.tentative:
            return False
        end = self.step_end
        return self.tentative >= self.rollback or (
            end is not None and end.reached(self.tokens, self.prompt_tokens, len(self.tokens))
        )

    @property
    def run_length(self) -> int:
        """Tokens committed by the holder since the request came to it."""
        return len(self.writers) - self.arrived

    def commit(self, code: int, done: RowDone, *, final: bool = False) -> FinishReason | None:
        """Append the token that model ``code`` sampled; answers why the response ends now, if it does.

        The token and all before it become final at once without ``rollback`` or with ``final``;
        otherwise those do that are further back than ``rollback`` allows, and all before a token that begins
        a step.
        """
        self.tokens.append(done.token)
        self.writers.append(code)
        self.written[code] += 1
        self.logprobs.append(done.logprob)
        self.tops.append(done.top)
        tentative = 0 if final else self.rollback
        if tentative and self.step_end is not None:
            begins_step = self.step_end.reached(self.tokens, self.prompt_tokens, len(self.tokens) - 1)
            tentative = 1 if begins_step else tentative
        return self._finalize(len(self.writers) - tentative)

    def confirm(self) -> FinishReason | None:
        """Make all tokens final; answers why the response ends now, if it does."""
        return self._finalize(len(self.writers))

    def rewind(self, length: int) -> None:
        """Take back all but the first ``length`` tokens; they must be tentative."""
        output = length - self.prompt_tokens
        if output < self.final:
            raise ValueError(f"output position {output} is final: {self.final} tokens are")
        self.written.subtract(self.writers[output:])
        self.taken_back += len(self.tokens) - length
        del self.tokens[length:]
        for column in (self.writers, self.logprobs, self.tops):
            del column[output:]
        self.arrived = min(self.arrived, output)
        self.seen = {code: min(known, length) for code, known in self.seen.items()}

    def move(self, code: int) -> None:
        """Hand the turn to model ``code``."""
        self.seen[self.holder] = self.seen[code] = len(self.tokens)
        self.holder = code
        self.arrived = len(self.writers)
        self.handoffs += 1

    def end(self, reason: FinishReason | None, error: TokenflowError | None) -> None:
        """The request is over, completed or failed."""
        self.phase = Phase.FINISHED
        self.finish_reason = reason
        self.error = error
        self.finished_at = time.monotonic()
        self.listener.wake(self)

    def _finalize(self, output: int) -> FinishReason | None:
        """Make the first ``output`` tokens final, in order; what follows one that ends the response goes."""
        while self.final < output:
            token = self.tokens[self.prompt_tokens + self.final]
            self.final += 1
            self.gave_up.clear()
            self.taken_back = 0
            if not self.first_token_at:
                self.first_token_at = time.monotonic()
            reason: FinishReason | None = None
            if token in self.limits.stop_ids or self.listener.committed(token):
                reason = "stop"
            elif self.final >= self.limits.max_tokens:
                reason = "length"
            if reason is not None:
                self.rewind(self.prompt_tokens + self.final)
                return reason
        return None
