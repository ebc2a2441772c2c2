"""Numbers of the public API: what is none is refused with a sentence, and not computed with."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tokenflow.actors.admission import Admission, QueueLimits
from tokenflow.errors import InvalidRequest
from tokenflow.numeric import is_integer, is_number
from tokenflow.prompts import check_many, check_timeout, check_top, param_values
from tokenflow.types import SamplingParams

NO_NUMBERS = [True, False, math.nan, math.inf, -math.inf, Decimal(1), Fraction(1), 10**400, "1", 1j, np.True_]


def reserve(requests: Any) -> None:
    with Admission(QueueLimits(1, 1), lambda: 1).reserve(requests):
        pass


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "use",
    [
        check_timeout,
        lambda value: check_many([], value),
        check_top,
        reserve,
        lambda value: param_values({"tau": 1.0}, {"tau": value}),
        lambda value: QueueLimits(value, 1),
        lambda value: QueueLimits(1, value),
        lambda value: SamplingParams(temperature=value),
        lambda value: SamplingParams(top_p=value),
        lambda value: SamplingParams(max_tokens=value),
        lambda value: SamplingParams(top_k=value),
        lambda value: SamplingParams(logit_bias={1: value}),
        lambda value: SamplingParams(seed=value),
    ],
)
def test_what_is_no_number_is_refused_wherever_one_is_taken(use: Callable[[Any], Any], value: object) -> None:
    with pytest.raises((InvalidRequest, ValueError), match=r" must be "):
        use(value)


def test_numbers_are_pythons_and_what_is_derived_of_them() -> None:
    assert is_number(1) and is_number(0.5) and is_number(np.float64(0.5))
    assert not is_number(np.float32(0.5)), "it would not travel to a worker"
    assert is_integer(2**63 - 1) and not is_integer(2**63) and not is_integer(np.int64(1))
    assert not is_integer(1.0) and not is_integer(0, least=1)
