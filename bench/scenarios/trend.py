"""Whether measurements that were taken one after the other go on rising."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_WINDOWS = 30
_SETTLED = 0.25
"""The first part is left out: caches fill, allocators find their size."""
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope per hour, and how far off it may be at 95 % confidence."""

    slope: float
    margin: float

    def verdict(self, flat: float) -> str:
        """``flat`` if it is surely below so much per hour, ``grows`` if it surely rises, and is not flat.

        Otherwise the measurement was too short to tell.
        """
        if self.slope + self.margin < flat:
            return "flat"
        return "grows" if self.slope - self.margin > 0 else "too short to tell"

    def __str__(self) -> str:
        return f"{self.slope:.3g} +- {self.margin:.2g}"


def trend(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """The line through the medians of 30 windows of time.

    Medians do away with what comes and goes within a window.  What is left hangs together from one window
    to the next, which makes n of them worth n (1 - r) / (1 + r), with r the correlation of neighbours.
    """
    times, measured = np.asarray(seconds) / 3600, np.asarray(values, dtype=float)
    settled = times >= times[0] + _SETTLED * (times[-1] - times[0])
    windows = np.array_split(np.arange(settled.sum()), min(_WINDOWS, int(settled.sum())))
    x = np.array([times[settled][window].mean() for window in windows])
    y = np.array([np.median(measured[settled][window]) for window in windows])
    line = stats.linregress(x, y)
    rest = y - (line.intercept + line.slope * x)
    power = float((rest**2).sum())
    if power < 1e-12:
        return Trend(float(line.slope), 0.0)
    correlation = min(max(float((rest[1:] * rest[:-1]).sum()) / power, 0.0), 0.95)
    worth = max(len(x) * (1 - correlation) / (1 + correlation), 3.0)
    error = line.stderr * math.sqrt((len(x) - 2) / max(worth - 2, 1.0))
    return Trend(float(line.slope), float(stats.t.ppf((1 + _CONFIDENCE) / 2, max(worth - 2, 1.0)) * error))
