"""Expression trees compiled to terms: the leaves here, what joins them in :mod:`tokenflow.routing.terms`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenflow.errors import ModelLoadError
from tokenflow.routing.delimiters import at, follows
from tokenflow.routing.heads.base import Head
from tokenflow.routing.memory import Memory, momentum, window
from tokenflow.routing.signals import Signals
from tokenflow.routing.terms import WHOLE_LIMIT, Malformed, Run, Term, operation

WHOLE_SIGNALS = ("token", "position", "run_length")
REAL_SIGNALS = ("entropy", "entropy_nats", "confidence", "margin", "logprob")
DOUBLE_SIGNALS = ("draw",)
_SIGNAL_LIMIT = 2**31
_LONGEST_WINDOW = 64
_LEAVES = ("number", "boolean", "signal", "param", "head", "threshold", "at", "follows", "window", "momentum")


@dataclass(frozen=True, slots=True)
class Scope:
    """What a model's trees may name, and the memories met in them so far by what they are of."""

    params: Collection[str]
    heads: Mapping[str, Head]
    memories: dict[str, Memory] = field(default_factory=dict)


def compile_tree(tree: Any, scope: Scope) -> Term:
    """Compile a condition or a number.

    :raises Malformed: if ``tree`` is neither, or names what is not in scope.
    :raises ModelLoadError: if it asks for the threshold of a head that has none.
    """
    match tree:
        case ["number", int() | float() as value] if not isinstance(value, bool):
            whole = isinstance(value, int) and abs(value) < WHOLE_LIMIT
            return Term("whole", value, limit=abs(int(value))) if whole else Term("real", float(value))
        case ["boolean", bool() as value]:
            return Term("truth", value)
        case ["signal", str() as name] if name in WHOLE_SIGNALS:
            return Term("whole", run=operator.attrgetter(name), limit=_SIGNAL_LIMIT)
        case ["signal", str() as name] if name in REAL_SIGNALS:
            return Term("real", run=operator.methodcaller(name))
        case ["signal", str() as name] if name in DOUBLE_SIGNALS:
            return Term("double", run=operator.attrgetter(name))
        case ["param", str() as name] if name in scope.params:
            return Term("real", run=operator.methodcaller("param", name))
        case ["head", str() as name] if name in scope.heads:
            return _score(name, scope.heads[name])
        case ["threshold", str() as name] if name in scope.heads:
            return _threshold(name, scope.heads[name])
        case ["at", [*sequences]] if _are_ids(sequences):
            run, length = at(sequences)
            return Term("truth", run=run, reads=frozenset({("tail", length)}))
        case ["follows", [*sequences]] if _are_ids(sequences):
            run, length = follows(sequences)
            return Term("truth", run=run, reads=frozenset({("tail", length)}))
        case ["window", of, int() as length] if 1 <= length <= _LONGEST_WINDOW:
            return _over_steps(tree, compile_tree(of, scope), scope, lambda read: window(read, length))
        case ["momentum", of, int() | float() as share] if 0 <= share < 1:
            return _over_steps(tree, compile_tree(of, scope), scope, lambda read: momentum(read, share))
        case [str() as node, *_] if node in _LEAVES:
            raise Malformed(f"unknown {node} {tree!r}")
        case [str() as node, *arguments]:
            return operation(node, [compile_tree(argument, scope) for argument in arguments])
    raise Malformed(f"not an expression: {tree!r}")


def _are_ids(sequences: list[Any]) -> bool:
    return bool(sequences) and all(
        isinstance(sequence, list | tuple)
        and sequence
        and all(isinstance(token, int) and 0 <= token < _SIGNAL_LIMIT for token in sequence)
        for sequence in sequences
    )


def _score(name: str, head: Head) -> Term:
    def score(signals: Signals) -> Tensor:
        return head.score(signals.hidden, signals.token, signals.raw).float()

    return Term("real", run=lambda signals: signals.once(("head", name), lambda: score(signals)))


def _threshold(name: str, head: Head) -> Term:
    if head.threshold is None:
        raise ModelLoadError(
            f"no threshold is stored with head {name!r}: give one in the recipe, heads.{name}.threshold"
        )
    return Term("real", float(head.threshold))


def _over_steps(tree: Any, term: Term, scope: Scope, make: Callable[[Run], Memory]) -> Term:
    """A window or a momentum over a number; where the same one stands twice, it is one."""
    if term.kind == "truth" or any(kind == "memory" for kind, _ in term.reads):
        raise Malformed(f"{tree[0]!r} needs a number that depends on this step only")
    inner = term.run

    def read(signals: Signals) -> Tensor:
        if inner is not None:
            return inner(signals)
        return torch.full((signals.batch,), term.value, dtype=torch.float64)

    memory = scope.memories.setdefault(repr(tree), make(read))
    return Term("real", run=memory.value, reads=term.reads | {("memory", memory)})
