"""Exact throughput: the stationary distribution of the embedded chain.

Every state that can be reached from the first one (all requests wait at the entry model) is enumerated,
for several candidate policies side by side; each candidate's chain is then solved by itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from tokenflow.planner.chain import Clock, Starter, States
from tokenflow.planner.linear import expected_total, stationary
from tokenflow.planner.model import BoolArray, FloatArray, IntArray

_CHUNK = 4096
_STATES_TOGETHER = 50_000
_OUTCOMES_PER_STATE = 40
_MOST_ROWS = 200_000
_MOST_OUTCOMES = 1_000_000


class Chain(NamedTuple):
    """One candidate's chain over its S reachable states; the first state is number 0.

    :param transitions: sparse [S, S].
    :param ticks: expected time to the next state, [S].
    :param tokens: expected output tokens committed on the way, [S].
    """

    transitions: sparse.csr_array
    ticks: FloatArray
    tokens: FloatArray


def tokens_per_tick(chain: Chain) -> float:
    """Long-run output tokens per tick, from the first state on.

    Periodic chains need no special care, since only the stationary distribution counts.  If the chain can
    end up in one of several closed classes (requests that never return from different models, say), it is
    the expectation over where it ends up.
    """
    classes, label = connected_components(chain.transitions, directed=True, connection="strong")
    source, target = chain.transitions.nonzero()
    is_closed = np.ones(classes, dtype=bool)
    is_closed[label[source[label[source] != label[target]]]] = False
    closed = [np.flatnonzero(label == c) for c in np.flatnonzero(is_closed)]
    rates = []
    for members in closed:
        share = stationary(chain.transitions[members][:, members])
        rates.append(float(share @ chain.tokens[members]) / float(share @ chain.ticks[members]))
    if len(closed) == 1:
        return rates[0]
    gain = np.zeros(len(label))
    for members, rate in zip(closed, rates, strict=True):
        gain[members] = rate
    transient = np.flatnonzero(~is_closed[label])
    leaving = chain.transitions[transient]
    gain[transient] = expected_total(leaving[:, transient], leaving @ gain)
    return float(gain[0])


@dataclass(frozen=True)
class Outcomes:
    """Where the requests of a step can go, by model and batch size.

    The outcomes of model i with batch b are the columns ``first[i, b]`` to ``first[i, b] + count[i, b]`` of
    ``moves`` (requests that go to each model, [M, K]) and ``probability`` ([K], multinomial).
    """

    first: IntArray
    count: IntArray
    moves: IntArray
    probability: FloatArray

    @classmethod
    def of(cls, clock: Clock) -> Outcomes:
        """All outcomes of batches up to each model's limit."""
        size = clock.model.size
        first = np.zeros((size, clock.concurrency + 1), dtype=np.int64)
        count = np.ones_like(first)  # a model that does not end a batch has the one empty outcome 0
        moves, probability = [np.zeros((size, 1), dtype=np.int64)], [np.ones(1)]
        columns = 1
        for i, limit in enumerate(clock.limits.tolist()):
            row = np.array(clock.model.routing[i])
            targets = np.flatnonzero(row)
            for batch in range(1, limit + 1):
                split = _compositions(batch, len(targets))
                move = np.zeros((size, len(split)), dtype=np.int64)
                move[targets] = split.T
                first[i, batch], count[i, batch] = columns, len(split)
                columns += len(split)
                moves.append(move)
                probability.append(_multinomial(split, row[targets]))
        return cls(first, count, np.concatenate(moves, axis=1), np.concatenate(probability))

    def rows(self, ended: IntArray) -> FloatArray:
        """How many outcomes each state has, [S], of requests whose step ended, [M, S]."""
        models = np.arange(len(ended))[:, None]
        rows: FloatArray = self.count[models, ended].prod(axis=0, dtype=float)
        return rows

    def expand(self, ended: IntArray, queued: IntArray) -> tuple[IntArray, FloatArray, IntArray]:
        """Route the requests of ended steps in every possible way.

        :param ended: requests whose step ended, [M, S].
        :param queued: requests that wait, [M, S].
        :returns: for each of K outcomes its state [K], its probability [K], and what then waits, [M, K].
        """
        state, probability = np.arange(ended.shape[1]), np.ones(ended.shape[1])
        for i, batches in enumerate(ended):
            batch = batches[state]
            count = self.count[i, batch]
            copies = np.repeat(np.arange(len(state)), count)
            nth = np.arange(len(copies)) - np.repeat(np.cumsum(count) - count, count)
            outcome = self.first[i, batch[copies]] + nth
            state = state[copies]
            probability = probability[copies] * self.probability[outcome]
            queued = queued[:, copies] + self.moves[:, outcome]
        return state, probability, queued


def can_enumerate(clock: Clock) -> bool:
    """Whether a state fits a 64-bit code and a step's outcomes a table; if not, the chain is too large."""
    targets = np.count_nonzero(np.array(clock.model.routing), axis=1).tolist()
    outcomes = sum(math.comb(b + t, t) for b, t in zip(clock.limits.tolist(), targets, strict=True))
    return outcomes <= _MOST_OUTCOMES and _codes(clock) <= np.iinfo(np.int64).max


def chains(clock: Clock, starter: Starter, candidates: int, state_limit: int) -> Iterator[Chain | int]:
    """The chain of each candidate; or, if it is too large, how many of its states were counted.

    Too large are more than ``state_limit`` states, or more than 40 times as many outcomes of their steps.
    """
    together = max(1, min(_STATES_TOGETHER // state_limit, np.iinfo(np.int64).max // _codes(clock)))
    outcomes = Outcomes.of(clock)
    for first in range(0, candidates, together):
        group = np.arange(first, min(first + together, candidates))
        yield from _explore(clock, starter, outcomes, group, state_limit)


def _explore(
    clock: Clock, starter: Starter, outcomes: Outcomes, group: IntArray, state_limit: int
) -> Iterator[Chain | int]:
    """Enumerate the chains of some candidates breadth first; all their states share one numbering."""
    index = StateIndex(clock)
    sizes = np.zeros(len(group), dtype=np.int64)
    spent = np.zeros(len(group))  # outcomes looked at
    todo: deque[tuple[IntArray, IntArray, States]] = deque()

    def discover(member: IntArray, states: States) -> IntArray:
        """Number the states of members of the group, and note those that are new."""
        fresh, number = index.number(member, states)
        sizes[:] += np.bincount(member[fresh], minlength=len(group))
        for part in np.split(fresh, range(_CHUNK, len(fresh), _CHUNK)):
            todo.append((member[part], number[part], states.take(part)))
        return number

    def within(member: IntArray) -> BoolArray:
        """Which chains are small enough so far."""
        small: BoolArray = (sizes[member] <= state_limit) & (
            spent[member] <= _OUTCOMES_PER_STATE * state_limit
        )
        return small

    begin = clock.at_entry(len(group))
    discover(np.arange(len(group)), clock.start(begin, starter(group, begin)))
    visited: list[tuple[IntArray, IntArray, IntArray, FloatArray]] = []
    edges: list[tuple[IntArray, IntArray, IntArray, FloatArray]] = []
    while todo:
        member, number, states = todo.popleft()
        small = within(member)
        if not small.all():
            member, number, states = member[small], number[small], states.take(small)
        if not len(member):
            continue
        ticks, ended, rest = clock.run(states)
        rows = outcomes.rows(ended)
        if rows.sum() > _MOST_ROWS and len(member) > 1:
            for part in reversed(np.array_split(np.arange(len(member)), 2)):
                todo.appendleft((member[part], number[part], states.take(part)))
            continue
        spent[:] += np.bincount(member, weights=rows, minlength=len(group))
        if len(member) == 1 and not within(member)[0]:
            continue
        visited.append((member, number, ticks, clock.tokens @ ended))
        source, probability, queued = outcomes.expand(ended, rest.queued)
        states = States(queued, rest.running[:, source], rest.left[:, source])
        states = clock.start(states, starter(group[member[source]], states))
        target = discover(member[source], states)
        edges.append((member[source], number[source], target, probability))
    if not visited:
        yield from sizes.tolist()
        return
    owner, number, ticks, tokens = (np.concatenate(parts) for parts in zip(*visited, strict=True))
    edge_owner, source, target, probability = (np.concatenate(parts) for parts in zip(*edges, strict=True))
    for nth, (size, small) in enumerate(zip(sizes.tolist(), within(np.arange(len(group))), strict=True)):
        if not small:
            yield size
            continue
        mine, edge = np.flatnonzero(owner == nth), np.flatnonzero(edge_owner == nth)
        names = number[mine]  # ascending: states are visited in the order of their numbers
        ends = (np.searchsorted(names, source[edge]), np.searchsorted(names, target[edge]))
        transitions = sparse.csr_array((probability[edge], ends), shape=(size, size))
        transitions.eliminate_zeros()  # outcomes whose probability underflows
        yield Chain(transitions, ticks[mine].astype(float), tokens[mine])


class StateIndex:
    """Numbers states in the order of their discovery."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._codes: IntArray = np.zeros(0, dtype=np.int64)
        self._numbers: IntArray = np.zeros(0, dtype=np.int64)

    @property
    def size(self) -> int:
        """How many states are numbered."""
        return len(self._codes)

    def number(self, candidate: IntArray, states: States) -> tuple[IntArray, IntArray]:
        """Number each state, [S].

        :returns: which hold a state for the first time, and the number of every one.
        """
        codes, where, inverse = np.unique(
            self._code(candidate, states), return_index=True, return_inverse=True
        )
        place = np.searchsorted(self._codes, codes)
        known = np.zeros(len(codes), dtype=bool)
        inside = place < self.size
        known[inside] = self._codes[place[inside]] == codes[inside]
        new = np.flatnonzero(~known)
        numbers = np.empty(len(codes), dtype=np.int64)
        numbers[known] = self._numbers[place[known]]
        numbers[new] = self.size + np.arange(len(new))
        self._codes = np.insert(self._codes, place[new], codes[new])
        self._numbers = np.insert(self._numbers, place[new], numbers[new])
        return where[new], numbers[inverse]

    def _code(self, candidate: IntArray, states: States) -> IntArray:
        clock, code = self._clock, candidate
        for i in range(clock.model.size):
            if i != clock.model.entry:  # what waits at the entry is all the rest
                code = code * (clock.concurrency + 1) + states.queued[i]
        for i, longest in enumerate(clock.latency.max(axis=1).tolist()):
            code = code * (clock.concurrency + 1) + states.running[i]
            code = code * (longest + 1) + states.left[i]
        return code


def _codes(clock: Clock) -> int:
    """How many codes the states of one candidate span."""
    counts = (clock.concurrency + 1) ** (2 * clock.model.size - 1)
    return int(counts * math.prod(longest + 1 for longest in clock.latency.max(axis=1).tolist()))


def _compositions(total: int, parts: int) -> IntArray:
    """Every way to write ``total`` as a sum of ``parts`` numbers of at least 0, [K, parts]."""
    if parts == 1:
        return np.full((1, 1), total)
    blocks = []
    for head in range(total + 1):
        tail = _compositions(total - head, parts - 1)
        blocks.append(np.hstack([np.full((len(tail), 1), head), tail]))
    return np.concatenate(blocks)


def _multinomial(split: IntArray, probability: FloatArray) -> FloatArray:
    """Probability of each way [K, J] to spread requests over targets [J]."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, split[0].sum() + 1)))])
    ways = log_factorial[split[0].sum()] - log_factorial[split].sum(axis=1)
    chance: FloatArray = np.exp(ways + split @ np.log(probability))
    return chance
