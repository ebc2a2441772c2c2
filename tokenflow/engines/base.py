"""The engine protocol: what every engine gives the worker loop, fixed for all of them.

An engine owns a model's weights and KV cache and knows token ids only.  A *slot* is one resident
sequence.  The caller never exceeds :attr:`EngineInfo.kv_capacity`, :attr:`EngineInfo.max_requests` or
:attr:`EngineInfo.context_length`: the router keeps the books.  ``tests/engines/conformance.py`` is the
executable form of this contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a loaded model.

    :param vocab_size: V, the width of the logits (may exceed the tokenizer's length).
    :param hidden_size: H, the width of the hidden states.
    :param context_length: most tokens of one slot.
    :param kv_capacity: tokens that all slots together may hold.
    :param block_size: KV cache is handed out in blocks of this many tokens; 1 where there are no blocks.
    :param max_requests: most slots open at once.
    :param eos_token_ids: end-of-sequence ids from the generation config and the model config.
    :param device: where the model runs, ``cpu`` or ``cuda:<n>``.
    :param dtype: compute type, ``float32``, ``bfloat16`` or ``float16``.
    """

    vocab_size: int
    hidden_size: int
    context_length: int
    kv_capacity: int
    block_size: int
    max_requests: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str


class Opened(NamedTuple):
    """A new slot, and how many of the announced tokens are in its KV cache already (prefix reuse)."""

    slot: int
    cached: int


class Feed(NamedTuple):
    """``tokens`` that are fed to ``slot``."""

    slot: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Extend:
    """Feed ``tokens`` (at least one) to ``slot``.

    ``logits`` says which positions are wanted: none (a chunk of a longer prefill), the last, or all.
    """

    slot: int
    tokens: Sequence[int]
    logits: Literal["none", "last", "all"] = "last"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results for the wanted positions, in the order of the extends (and of tokens inside one).

    :param logits: raw next-token logits, [n, V], in the engine's dtype or float32.
    :param hidden: last-layer hidden states after the final norm (the LM head's input), [n, H].
    :param known: how many of the most probable tokens of each row have their own logits, int64 [n]; the
        others share what is left and are not to be drawn.  ``None`` where all have.
    :param failed: extends that got no results, by index, and why; the others are not affected.
    """

    logits: Tensor
    hidden: Tensor
    known: Tensor | None = None
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of given tokens.

    :param logprobs: of ``tokens[1:]``, each after the tokens before it, float32 [n - 1].
    :param top_ids: most probable ids at the same positions, int64 [n - 1, top].
    :param top_logprobs: their log-probabilities, float32 [n - 1, top].
    """

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Engine(Protocol):
    """A model with a KV cache."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""

    @property
    def embeddings(self) -> Tensor:
        """The input embedding table, [V, E], not to be written to; router heads read it."""

    def open(self, tokens: Sequence[int]) -> Opened:
        """Open a slot for a sequence that begins with ``tokens``; nothing is computed yet.

        The KV cache of a prefix that another slot holds or held may be reused: ``cached`` tokens (always
        fewer than ``len(tokens)``) need not be fed.

        :raises EngineError: if every slot is taken.
        """

    def step(self, extends: Sequence[Extend]) -> StepOutput:
        """Feed every extend's tokens in one batch; a slot occurs at most once.

        First prefills, catch-up extends of any length and single-token decodes mix freely.

        :raises EngineError: on a slot that is not open, an empty extend, or a device failure.
        """

    def length(self, slot: int) -> int:
        """How many tokens the slot's KV cache holds."""

    def truncate(self, slot: int, length: int) -> None:
        """Forget what follows the slot's first ``length`` tokens; 0 forgets everything.

        :raises EngineError: if ``length`` is negative or more than the slot holds.
        """

    def release(self, slot: int) -> None:
        """Close the slot; its KV cache may serve later prefixes until the space is needed."""

    def score(self, tokens: Sequence[int], top: int = 0) -> Scores:
        """Log-probabilities of ``tokens[1:]`` over the full width of the logits, in float32.

        :raises EngineError: if there is nothing to score (fewer than two tokens).
        """

    def close(self) -> None:
        """Give device memory back; the engine is not used afterwards."""
