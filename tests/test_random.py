"""Random numbers depend on their key and on nothing else."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokenflow.random import uniform

KEYS = st.tuples(
    st.integers(-(2**63), 2**64 - 1), st.integers(0, 9), st.integers(0, 2**40), st.integers(0, 9), st.text()
)


@given(KEYS)
def test_a_key_always_gives_the_same_number_in_the_half_open_interval(
    key: tuple[int, int, int, int, str],
) -> None:
    number = uniform(*key)
    assert 0 <= number < 1
    assert number == uniform(*key)


@given(KEYS, KEYS)
def test_different_keys_give_different_numbers(
    a: tuple[int, int, int, int, str], b: tuple[int, int, int, int, str]
) -> None:
    same = (a[0] - b[0]) % 2**64 == 0 and a[1:] == b[1:]
    assert (uniform(*a) == uniform(*b)) == same


def test_the_numbers_stay_what_they_were_in_the_first_release() -> None:
    """A change would alter every sampled response; the values were computed by an independent script."""
    assert uniform(0, 0, 0, 1, "token") == 0.41825040051691775
    assert uniform(-1, 2, 300, 4, "draw") == 0.35359874254404633


def test_consecutive_positions_look_uniform_and_independent() -> None:
    n = 20_000
    numbers = [uniform(7, 0, position, 1, "token") for position in range(n)]
    counts = [0] * 50
    for number in numbers:
        counts[int(number * 50)] += 1
    chi_square = sum((count - n / 50) ** 2 / (n / 50) for count in counts)
    assert chi_square < 85.4  # 99.9 % point for 49 degrees of freedom
    mean = sum(numbers) / n
    lag = sum((a - mean) * (b - mean) for a, b in pairwise(numbers)) * 12 / n
    assert abs(lag) < 4 / math.sqrt(n)
