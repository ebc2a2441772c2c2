"""Windows and momentums over the steps of requests that come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from tests.routing.oracle import float32
from tests.routing.test_rules import Given, blank, compiled, row
from tokenflow.routing.rules import Rules


def states(rules: Rules, values: Sequence[float], name: str = "entropy") -> list[list[float]]:
    """The state of one request after each step, for these values of a signal."""
    state, found = blank(rules, 1), []
    for value in values:
        state = rules.memories.kept(Given([row(**{name: value})], state=state))
        found += state
    return found


def fires(rules: Rules, values: Sequence[float], name: str = "entropy") -> list[bool]:
    """Whether the rule fires after each step of one request, for these values of a signal."""
    state, found = blank(rules, 1), []
    for value in values:
        signals = Given([row(**{name: value})], tail=rules.tail, state=state)
        found.append(rules(signals) == [0])
        state = rules.memories.kept(signals)
    return found


def test_a_window_is_the_mean_over_fewer_steps_at_first() -> None:
    values = [1.0, 3.0, 5.0, 4.0, 0.0]
    for mean, count in ((1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4), (3.0, 5)):
        assert fires(compiled(f"window(entropy, 3) == {mean}"), values[:count])[-1]


def test_a_window_of_one_step_is_the_value_itself() -> None:
    assert fires(compiled("window(entropy, 1) == entropy"), [0.1, 0.7, -3.0]) == [True] * 3


def test_a_window_of_a_condition_is_the_share_of_steps_where_it_held() -> None:
    held = fires(compiled("window(entropy > 0.5, 4) >= 0.5"), [0, 1, 0, 0, 1, 0])
    assert held == [False, True, False, False, True, False]


def test_a_window_forgets_what_is_no_number() -> None:
    values = [0.25, math.inf, 0.5, 0.25, 0.5, math.nan, 0.5, 0.5, 0.5]
    held = fires(compiled("window(entropy, 2) < 1 and not window(entropy, 2) == 0.25"), values)
    assert held == [False, False, False, True, True, False, False, True, True]


def test_a_momentum_starts_from_0_and_moves_by_its_share() -> None:
    rules = compiled("momentum(entropy < 0.5, 0.7) > 0.3")
    assert states(rules, [0, 0, 1]) == [[pytest.approx(x)] for x in (0.3, 0.51, 0.357)]
    assert fires(rules, [0, 0, 1, 1, 1]) == [False, True, True, False, False]


def test_a_momentum_meets_its_threshold_as_a_float32() -> None:
    """In double, (1 - 0.7) * 1 is a little more than 0.3."""
    assert fires(compiled("momentum(true, 0.7) <= 0.3"), [0]) == [True]


def test_a_momentum_without_memory_is_the_value_itself() -> None:
    assert fires(compiled("momentum(entropy, 0) == entropy"), [0.1, 0.7, -3.0]) == [True] * 3


def test_whole_numbers_are_kept_exactly() -> None:
    ids = [2**31 - 1, 2**31 - 3, 2**31 - 5]
    assert states(compiled("window(token, 3) > 0"), ids, "token")[-1] == [2, *ids[1:]]
    assert fires(compiled(f"window(token, 3) == {float32(2**31 - 3)}"), ids, "token")[-1]


def test_constants_fill_windows_and_momentums_too() -> None:
    assert fires(compiled("window(0.1, 3) == 0.1"), [0] * 4) == [True] * 4
    assert fires(compiled("momentum(1, 0.5) > 0.8"), [0] * 3) == [False, False, True]


def test_the_same_window_in_several_rules_is_kept_once() -> None:
    rules = compiled("window(entropy, 3) > 0.9", "window(entropy, 3) > 0.5", "window(entropy, 4) > 0.5")
    assert rules.memories.width == 7
    assert [memory.start for memory in rules.memories.each] == [0, 3]


def test_the_state_advances_whatever_rule_fires() -> None:
    rules = compiled("position == 0", "window(entropy, 2) > 0.5", "true")
    state = blank(rules, 1)
    for position, entropy, expected in ((0, 1.0, 0), (1, 0.25, 1), (2, 0.25, 2)):
        signals = Given([row(position=position, entropy=entropy)], state=state)
        assert rules(signals) == [expected]
        state = rules.memories.kept(signals)


def test_asking_twice_advances_once() -> None:
    rules = compiled("window(entropy, 3) > 0.5 or momentum(entropy, 0.5) > 0.5")
    signals = Given([row(entropy=1)], state=blank(rules, 1))
    first = rules.memories.kept(signals)
    assert rules(signals) == [0]
    assert rules.memories.kept(signals) == first
    assert signals.state == blank(rules, 1)


def test_rows_of_one_batch_may_be_at_different_steps() -> None:
    rules = compiled("window(entropy, 3) >= 0.5")
    old = rules.memories.kept(Given([row(entropy=1)], state=blank(rules, 1)))
    state = [*old, *blank(rules, 1)]
    assert rules(Given([row(entropy=0.0), row(entropy=0.0)], state=state)) == [0, -1]


def test_a_state_that_went_over_the_wire_is_the_same() -> None:
    rules = compiled("momentum(entropy, 0.7) > 0.5 or window(logprob, 3) > 0")
    state = rules.memories.kept(Given([row(entropy=0.1, logprob=-0.7)], state=blank(rules, 1)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state)) == state
