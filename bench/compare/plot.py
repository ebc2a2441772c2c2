"""A bar chart as SVG text: equal figures give equal bytes, and nothing needs to be installed."""

from __future__ import annotations

from collections.abc import Sequence

COLORS = ("#c2410c", "#64748b", "#1d4ed8", "#60a5fa", "#a5b4fc", "#ea580c")
BAR, GAP, PANEL, TOP, LEFT, HEIGHT = 9, 10, 34, 46, 46, 180

Group = tuple[str, Sequence[tuple[str, Sequence[float]]]]
"""A panel's title, and its clusters of bars: a name, and a value for each series."""


def bars(groups: Sequence[Group], series: Sequence[str], unit: str) -> str:
    """One panel per group, side by side, with one scale from 0; each cluster has a bar per series."""
    most = max((value for _, clusters in groups for _, values in clusters for value in values), default=1.0)
    step = _step(most)
    ticks = [index * step for index in range(int(most / step) + 2)]
    scale = HEIGHT / ticks[-1]
    cluster = BAR * len(series) + GAP
    widths = [cluster * len(clusters) for _, clusters in groups]
    width = LEFT + sum(widths) + PANEL * (len(groups) - 1) + 10
    bottom = TOP + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 60}" '
        f'viewBox="0 0 {width} {bottom + 60}" font-family="sans-serif" font-size="11" fill="#334155">',
        f'<rect width="{width}" height="{bottom + 60}" fill="white"/>',
        _text(4, 14, unit),
    ]
    x = LEFT
    for (title, clusters), panel in zip(groups, widths, strict=True):
        parts.append(_text(x, 34, title, weight="bold"))
        for tick in ticks:
            y = bottom - tick * scale
            parts.append(f'<path d="M{x} {y:.1f}h{panel}" stroke="#e2e8f0"/>')
            if x == LEFT:
                parts.append(_text(LEFT - 6, y + 4, f"{tick:,.0f}", anchor="end"))
        for number, (name, values) in enumerate(clusters):
            left = x + number * cluster + GAP / 2
            for index, value in enumerate(values):
                height = value * scale
                parts.append(
                    f'<rect x="{left + index * BAR:.1f}" y="{bottom - height:.1f}" width="{BAR - 1}" '
                    f'height="{height:.1f}" fill="{COLORS[index]}"><title>{name}, {series[index]}: '
                    f"{value:,.0f}</title></rect>"
                )
            parts.append(_text(left + BAR * len(series) / 2, bottom + 15, name, anchor="middle"))
        x += panel + PANEL
    x = LEFT
    for index, name in enumerate(series):
        parts.append(f'<rect x="{x}" y="{bottom + 33}" width="10" height="10" fill="{COLORS[index]}"/>')
        parts.append(_text(x + 15, bottom + 42, name))
        x += 40 + 7 * len(name)
    return "\n".join([*parts, "</svg>", ""])


def _step(most: float) -> float:
    """A round distance that divides the scale into at most six parts."""
    size = 10.0 ** (len(str(int(most))) - 1)
    return next(size * part for part in (0.2, 0.25, 0.5, 1.0, 2.0) if most / (size * part) <= 6)


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'
