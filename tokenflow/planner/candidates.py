"""Which thresholds a search looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from tokenflow.planner.model import RoutingModel, Throughput

_MOST = 6000
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def candidate_sets(
    model: RoutingModel, concurrency: int, found: Mapping[tuple[int, ...], Throughput]
) -> Iterator[list[tuple[int, ...]]]:
    """All feasible thresholds; or, where they are too many, a grid first and the cells around its best next.

    :param found: filled in by the caller: the throughput of what came before.
    """
    ranges = [range(1, most + 1) for most in _largest(model, concurrency)]
    if _count(ranges, concurrency) <= _MOST:
        yield _product(ranges, concurrency)
        return
    grids = [sorted({b for b in _GRID if b in values} | {values[-1]}) for values in ranges]
    while _count(grids, concurrency) > _MOST:
        grids = [grid[::2] for grid in grids]
    yield _product(grids, concurrency)
    best = max(found, key=lambda thresholds: found[thresholds].at_least)
    for reach in range(concurrency, 0, -1):
        cells = [_cell(grid, b, reach) for grid, b in zip(grids, best, strict=True)]
        if _count(cells, concurrency) <= _MOST:
            if fresh := [
                thresholds for thresholds in _product(cells, concurrency) if thresholds not in found
            ]:
                yield fresh
            return


def neighbours(model: RoutingModel, concurrency: int, at: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Feasible thresholds that differ from ``at`` in one model, by 1 or 2."""
    near = ((*at[:i], at[i] + change, *at[i + 1 :]) for i in range(len(at)) for change in (-2, -1, 1, 2))
    largest = _largest(model, concurrency)
    return [
        b
        for b in near
        if sum(b) - len(b) < concurrency and all(1 <= x <= most for x, most in zip(b, largest, strict=True))
    ]


def _largest(model: RoutingModel, concurrency: int) -> list[int]:
    """The largest threshold of each model; a model that is never reached keeps 1."""
    return [model.batch_limit(i, concurrency) if seen else 1 for i, seen in enumerate(model.reachable())]


def _cell(grid: Sequence[int], best: int, reach: int) -> range:
    """The values between the neighbours of ``best`` in ``grid``, at most ``reach`` away from it."""
    at = grid.index(best)
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]
    return range(max(low, best - reach), min(high, best + reach) + 1)


def _product(values: Iterable[Sequence[int]], concurrency: int) -> list[tuple[int, ...]]:
    """All combinations that cannot deadlock: sum(B_i - 1) < N."""
    partial: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for choices in values:
        partial = [
            ((*b, x), held + x - 1) for b, held in partial for x in choices if held + x - 1 < concurrency
        ]
    return [thresholds for thresholds, _ in partial]


def _count(values: Iterable[Sequence[int]], concurrency: int) -> int:
    """How many combinations cannot deadlock."""
    ways = np.zeros(concurrency)  # by the number of requests that they can hold back
    ways[0] = 1
    for choices in values:
        longer = np.zeros(concurrency)
        for x in choices:
            longer[x - 1 :] += ways[: concurrency - x + 1]
        ways = longer
    return int(ways.sum())
