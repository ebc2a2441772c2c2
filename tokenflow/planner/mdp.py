"""The yardstick: the highest throughput that any start policy can reach.

A Markov decision process over the same states: whenever batches have ended, any set of idle models may start
with all that waits for them.  Solved by policy iteration (Howard 1960; for unequal times between decisions,
Jewell 1963), which is exact and takes few rounds, but needs every state: two models and some 16 requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from tokenflow.errors import PlanError
from tokenflow.planner.chain import Clock, States
from tokenflow.planner.dtmc import Outcomes, StateIndex, can_enumerate
from tokenflow.planner.linear import expected_total, stationary
from tokenflow.planner.model import (
    BoolArray,
    FloatArray,
    IntArray,
    RoutingModel,
    Throughput,
    check_concurrency,
)

_CHUNK = 1024
_ROUNDS = 50
_EQUAL = 1e-9


def optimum(model: RoutingModel, concurrency: int, *, state_limit: int = 300_000) -> Throughput:
    """Long-run output tokens/s of the best possible policy that starts batches when batches end.

    :raises PlanError: for a model with jitter or run lengths, where more than ``state_limit`` states can be
        reached, or where the routing lets requests end up in different sets of models for ever.
    """
    concurrency = check_concurrency(concurrency)
    if not model.is_markov:
        raise PlanError("the optimum over all policies needs constant latencies and geometric runs")
    clock = Clock.of(model, concurrency)
    process = _enumerate(clock, state_limit)
    actions = process.after >= 0
    # Begin with eager starts: the set that starts most.
    choice = process.after.shape[1] - 1 - np.argmax(actions[:, ::-1], axis=1)
    every = np.arange(len(choice))
    gain = 0.0
    for _ in range(_ROUNDS):
        gain, value = _evaluate(process, process.after[every, choice])
        offered = np.where(actions, value[process.after], -np.inf)
        better = offered.max(axis=1) > offered[every, choice] + _EQUAL * (1 + np.abs(value).max())
        if not better.any():
            break
        choice = np.where(better, offered.argmax(axis=1), choice)
    return Throughput(gain * clock.ticks_per_s, "exact", 0.0, len(process.ticks))


@dataclass(frozen=True)
class _Process:
    """D decision states, where batches have just ended, and S states after the decision.

    :param after: state after each set of starts, [D, 2 ** M]; -1 where that set is not allowed.
    :param transitions: from states to decision states, [S, D].
    :param ticks: time in each state, [S].
    :param tokens: expected output tokens committed in each state, [S].
    """

    after: IntArray
    transitions: sparse.csr_array
    ticks: FloatArray
    tokens: FloatArray


def _evaluate(process: _Process, follow: IntArray) -> tuple[float, FloatArray]:
    """Tokens per tick, and the relative value of each state, of the policy that follows D decision states by
    the states ``follow``."""
    decisions = len(follow)
    policy = sparse.csr_array(
        (np.ones(decisions), (np.arange(decisions), follow)), (decisions, len(process.ticks))
    )
    chain = (process.transitions @ policy).tocsr()
    classes, label = connected_components(chain, directed=True, connection="strong")
    source, target = chain.nonzero()
    closed = np.setdiff1d(np.arange(classes), label[source[label[source] != label[target]]])
    if len(closed) != 1:
        raise PlanError(
            "no single long-run throughput: the routing lets the system end up in different states"
        )
    members = np.flatnonzero(label == closed[0])
    share = stationary(chain[members][:, members])
    gain = float(share @ process.tokens[members]) / float(share @ process.ticks[members])
    # Values are relative to a frequent state, whose own is 0.
    others = np.delete(np.arange(len(label)), members[np.argmax(share)])
    value = np.zeros(len(label))
    value[others] = expected_total(chain[others][:, others], (process.tokens - gain * process.ticks)[others])
    return gain, value


def _enumerate(clock: Clock, state_limit: int) -> _Process:
    """Everything that any policy can reach."""
    if not can_enumerate(clock):
        raise PlanError("too many states for the optimum over all policies; use fewer requests or models")
    size = clock.model.size
    sets: BoolArray = np.array([[bool(a >> i & 1) for i in range(size)] for a in range(2**size)])
    outcomes, before, after = Outcomes.of(clock), StateIndex(clock), StateIndex(clock)
    states = clock.at_entry(1)
    before.number(np.zeros(1, dtype=np.int64), states)
    todo = deque([(np.zeros(1, dtype=np.int64), states)])
    decisions: list[tuple[IntArray, IntArray, IntArray]] = []
    edges: list[tuple[IntArray, IntArray, FloatArray]] = []
    ticks: list[IntArray] = []
    tokens: list[FloatArray] = []
    while todo:
        number, states = todo.popleft()
        if not len(number):
            continue
        source, action, states = _decide(clock, sets, states)
        fresh, target = after.number(np.zeros_like(source), states)
        decisions.append((number[source], action, target))
        if after.size > state_limit:
            raise PlanError(
                f"more than {state_limit} states; use fewer requests, fewer models or a longer quantum"
            )
        states, number = states.take(fresh), target[fresh]
        elapsed, ended, rest = clock.run(states)
        ticks.append(elapsed)
        tokens.append(clock.tokens @ ended)
        source, probability, queued = outcomes.expand(ended, rest.queued)
        states = States(queued, rest.running[:, source], rest.left[:, source])
        fresh, target = before.number(np.zeros_like(source), states)
        edges.append((number[source], target, probability))
        for part in np.array_split(fresh, len(fresh) // _CHUNK + 1):
            todo.append((target[part], states.take(part)))
    table = np.full((before.size, len(sets)), -1)
    decision, action, target = (np.concatenate(parts) for parts in zip(*decisions, strict=True))
    table[decision, action] = target
    source, target, probability = (np.concatenate(parts) for parts in zip(*edges, strict=True))
    transitions = sparse.csr_array((probability, (source, target)), (after.size, before.size))
    return _Process(table, transitions, np.concatenate(ticks).astype(float), np.concatenate(tokens))


def _decide(clock: Clock, sets: BoolArray, states: States) -> tuple[IntArray, IntArray, States]:
    """Every allowed set of starts for every state: state, set, and the state after it.

    Something has to run afterwards, and what starts has to be idle with requests waiting.
    """
    startable = (states.running == 0) & (states.queued > 0)
    runs = (states.running > 0).any(axis=0)
    parts = []
    for action, chosen in enumerate(sets):
        allowed = ~(chosen[:, None] & ~startable).any(axis=0) & (runs | chosen.any())
        which = np.flatnonzero(allowed)
        go = np.broadcast_to(chosen[:, None], (len(chosen), len(which)))
        parts.append((which, np.full(len(which), action), clock.start(states.take(which), go)))
    which, action, after = zip(*parts, strict=True)
    queued, running, left = (np.concatenate(arrays, axis=1) for arrays in zip(*after, strict=True))
    return np.concatenate(which), np.concatenate(action), States(queued, running, left)
