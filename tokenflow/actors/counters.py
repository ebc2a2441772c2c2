"""What an actor has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from tokenflow.wire.messages import StepDone

_UNMEASURED_STEP_S = 0.05
_SHARE_OF_NEWEST = 0.1


@dataclass(slots=True)
class Counters:
    """Sums over an actor's steps, in tokens and seconds, and the duration of a typical one."""

    steps: int = 0
    rows: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    committed_tokens: int = 0
    forward_s: float = 0.0
    step_s: float = 0.0
    step_average_s: float = _UNMEASURED_STEP_S

    def count(self, done: StepDone) -> None:
        """A step was run."""
        seconds = done.ended - done.started
        self.steps += 1
        self.rows += len(done.rows)
        self.computed_tokens += done.computed
        self.cached_tokens += done.cached
        self.forward_s += done.forward_s
        self.step_s += seconds
        if done.rows:
            self.step_average_s += _SHARE_OF_NEWEST * (seconds - self.step_average_s)
