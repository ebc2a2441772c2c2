"""The requests that a worker holds: settings, token ids and the engine slot of each handle."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenflow.engines.base import Engine
from tokenflow.engines.sampling import Draw
from tokenflow.errors import ProtocolError
from tokenflow.wire.messages import Open, Row, Step


@dataclass(slots=True)
class Resident:
    """One open handle.

    ``tokens`` are all ids given so far; the first ``fed`` of them are in the KV cache.  ``slot`` is -1
    until the engine has seen the request.  The last ``check`` tokens are to be
    checked.  ``state`` is what the rules' windows and momentums hold, and ``draw`` what the sampler needs; it
    reads ``tokens``.
    """

    settings: Open
    tokens: list[int] = field(default_factory=list)
    fed: int = 0
    slot: int = -1
    check: int = 0
    state: list[float] = field(default_factory=list)
    draw: Draw = field(init=False)

    def __post_init__(self) -> None:
        opened = self.settings
        self.state = list(opened.state)
        self.draw = Draw(opened.sampling, opened.seed, self.tokens, opened.prompt_tokens)

    @property
    def pending(self) -> int:
        """How many tokens are given but not yet fed."""
        return len(self.tokens) - self.fed

    @property
    def position(self) -> int:
        """Output index, from 0, of the token after those that are fed."""
        return self.fed - self.settings.prompt_tokens

    def tail(self, length: int) -> list[int]:
        """The last ``length`` output tokens, -1 in front where there are fewer."""
        output = self.tokens[max(self.settings.prompt_tokens, len(self.tokens) - length) :]
        return [-1] * (length - len(output)) + output


class Residents:
    """Applies what each step says about handles, and keeps engine slots in step with them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_handle: dict[int, Resident] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    def apply(self, step: Step) -> None:
        """Drop, open and truncate as the step says.

        :raises ProtocolError: on a handle that is not open, or a length that it does not have.
        """
        for handle in step.drop:
            self._release(self._by_handle.pop(handle, None))
        for settings in step.open:
            self._release(self._by_handle.pop(settings.handle, None))
            self._by_handle[settings.handle] = Resident(settings)
        for handle, length in step.truncate:
            self._truncate(handle, length)

    def extend(self, row: Row) -> tuple[Resident, int]:
        """Take a row's tokens; returns its resident and how many of them a prefix cache saved.

        :raises ProtocolError: if the row does not continue what this worker holds.
        """
        resident = self._get(row.handle)
        if resident.settings.epoch != row.epoch or len(resident.tokens) != row.base:
            raise ProtocolError(
                f"row of handle {row.handle} (epoch {row.epoch}, base {row.base}) does not continue epoch "
                f"{resident.settings.epoch} with {len(resident.tokens)} tokens"
            )
        resident.tokens.extend(row.tokens)
        resident.check = row.check
        # The token before those to be checked, or before the one to be sampled, must be fed: its logits are
        # wanted.  A request that was taken back to where this model had read to has none: it is read again.
        read = len(resident.tokens) - row.check - 1
        if read < 0:
            raise ProtocolError(f"row of handle {row.handle} has nothing to feed")
        if resident.fed > read:
            self._engine.truncate(resident.slot, read)
            resident.fed = read
        if resident.slot >= 0:
            return resident, 0
        opened = self._engine.open(resident.tokens[: read + 1])
        resident.slot, resident.fed = opened.slot, opened.cached
        return resident, opened.cached

    def keep(self, resident: Resident, length: int) -> None:
        """Forget what follows a resident's first ``length`` tokens."""
        del resident.tokens[length:]
        if resident.fed > length:
            self._engine.truncate(resident.slot, length)
            resident.fed = length

    def _get(self, handle: int) -> Resident:
        resident = self._by_handle.get(handle)
        if resident is None:
            raise ProtocolError(f"handle {handle} is not open")
        return resident

    def _release(self, resident: Resident | None) -> None:
        if resident is not None and resident.slot >= 0:
            self._engine.release(resident.slot)

    def _truncate(self, handle: int, length: int) -> None:
        resident = self._get(handle)
        if not 0 <= length <= len(resident.tokens):
            raise ProtocolError(
                f"handle {handle} has {len(resident.tokens)} tokens and cannot keep {length} of them"
            )
        self.keep(resident, length)


def plan(residents: list[Resident], budget: int) -> list[int]:
    """How many pending tokens each resident feeds in one step of at most ``budget`` tokens.

    Decodes (one pending token) always run; what is left goes to longer extends in order, so a long
    prefill is cut into chunks and never holds its neighbours up for more than one step.  Where decodes
    alone fill the budget, the first longer extend still gets one token: nothing waits for ever.  Tokens to
    be checked are fed in a step of their own, together with the one before them, over the budget if need be.
    """
    shares = [1 if resident.pending == 1 else 0 for resident in residents]
    left = max(budget - sum(shares), 1)
    for index, resident in enumerate(residents):
        if resident.pending > 1:
            before = resident.pending - resident.check - 1
            if resident.check:
                share = min(before, left) if before else resident.pending
            else:
                share = min(resident.pending, left)
            shares[index] = share
            left = max(left - share, 0)
    return shares
