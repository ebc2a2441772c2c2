"""The verdict on memory is that of statistics: flat, growing, or too short to tell."""

from __future__ import annotations

import numpy as np
import pytest

from bench.scenarios.trend import trend

SECONDS = np.arange(600.0)


def noise(correlation: float, seed: int) -> np.ndarray:
    """Measurements of which each hangs together with the one before, with a deviation of 1."""
    dice, values = np.random.default_rng(seed), [0.0]
    for step in dice.normal(0, (1 - correlation**2) ** 0.5, len(SECONDS) - 1):
        values.append(correlation * values[-1] + step)
    return np.array(values)


@pytest.mark.parametrize("correlation", [0.0, 0.9, 0.97])
def test_what_is_flat_is_seldom_called_growing(correlation: float) -> None:
    verdicts = [trend(SECONDS, 200 + noise(correlation, seed)).verdict(10.0) for seed in range(100)]
    assert verdicts.count("grows") <= 8


def test_a_leak_is_seen() -> None:
    leak = 20 * SECONDS / 3600
    found = trend(SECONDS, 200 + leak + 0.2 * noise(0.5, 1))
    assert found.verdict(10.0) == "grows"
    assert found.slope == pytest.approx(20, abs=found.margin)
    assert str(found).startswith(f"{found.slope:.3g} +- ")


def test_what_fills_at_the_start_and_single_peaks_do_not_count() -> None:
    values = 200 - 50 * np.exp(-SECONDS / 20)
    values[::17] += 30
    assert trend(SECONDS, values).verdict(1.0) == "flat"


def test_a_short_or_noisy_measurement_is_no_proof() -> None:
    assert trend(SECONDS[:60], 200 + noise(0.9, 3)[:60]).verdict(10.0) == "too short to tell"
    assert trend(SECONDS, np.full(600, 7.0)).verdict(1.0) == "flat"
