"""What counts as a number in the public API: Python's own; no truth values, NaN or infinity."""

from __future__ import annotations

import numbers
import sys
from fractions import Fraction
from typing import Any, TypeGuard

_LARGEST = sys.float_info.max


def is_integer(value: object, least: int = -(2**63), below: int = 2**63) -> TypeGuard[int]:
    """Whether a value is an integer in a range, by default one that a message to a worker can carry."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < below


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def plain(value: Any) -> Any:
    """A number of another library (a scalar of numpy, say) as one of Python's own; all else as it is."""
    if isinstance(value, int | float | Fraction) or not isinstance(value, numbers.Real):
        return value
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except OverflowError:
        return value
