"""Line charts: as text for a terminal, as SVG, and as a PNG where matplotlib is installed."""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_COLORS = ("#1f6f8b", "#d1495b", "#66a182", "#8d6a9f", "#edae49", "#3d5a80", "#9c6644", "#6c757d")
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 40, 50
_TICKS = 5

_Place = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    :param points: y by x.
    :param marked: the x that stands out; None if none does.
    :param dashed: drawn in dashes, without dots.
    """

    name: str
    points: Mapping[int, float]
    marked: int | None = None
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one x axis."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def as_text(line: Line, width: int = 50) -> list[str]:
    """One row per x, with a dot where y is between the lowest and the highest; the marked x has a star."""
    low, high = min(line.points.values()), max(line.points.values())
    scale = (width - 1) / (high - low) if high > low else 0.0
    digits = max(len(str(x)) for x in line.points)
    rows = []
    for x, y in line.points.items():
        dot = "★" if x == line.marked else "●"
        at = round((y - low) * scale)
        rows.append(f"{x:>{digits}} ┤{' ' * at}{dot}{' ' * (width - at)}{y:.1f}")
    return rows


def as_svg(chart: Chart) -> str:
    """The chart as an SVG image."""
    xs = sorted({x for line in chart.lines for x in line.points})
    ys = [y for line in chart.lines for y in line.points.values()]
    y_ticks = _ticks(min(ys), max(ys))
    x_span, y_span = max(xs[-1] - xs[0], 1), max(y_ticks[-1] - y_ticks[0], 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - xs[0]) / x_span * (_WIDTH - _LEFT - _RIGHT)
        up = _HEIGHT - _BOTTOM - (y - y_ticks[0]) / y_span * (_HEIGHT - _TOP - _BOTTOM)
        return round(across, 1), round(up, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        _text(_LEFT, 22, chart.title, "start", "bold"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, chart.x_label),
        f'<g transform="translate(18 {_HEIGHT / 2}) rotate(-90)">{_text(0, 0, chart.y_label)}</g>',
    ]
    for y in y_ticks:
        _, up = place(xs[0], y)
        parts.append(f'<path d="M{_LEFT} {up}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, up + 4, f"{y:g}", "end"))
    for x in xs if len(xs) <= 24 else xs[:: math.ceil(len(xs) / 12)]:
        across, _ = place(x, y_ticks[0])
        parts.append(_text(across, _HEIGHT - _BOTTOM + 18, str(x)))
    for index, line in enumerate(chart.lines):
        parts += _drawn(line, _COLORS[index % len(_COLORS)], index, place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_chart(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Write charts to a file: ``.html`` and ``.svg`` (one chart) need nothing, ``.png`` needs matplotlib.

    :raises OSError: if the file cannot be written.
    :raises ValueError: see :func:`check_target`.
    """
    check_target(path)
    if path.suffix == ".png":
        _write_png(charts, path)
    elif path.suffix == ".svg":
        path.write_text(as_svg(charts[0]), encoding="utf-8")
    else:
        body = "\n".join(map(as_svg, charts))
        page = f'<!doctype html>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n{body}'
        path.write_text(page, encoding="utf-8")


def check_target(path: Path) -> None:
    """See that charts can be written to a file of this name, before they are made.

    :raises ValueError: if not; the message says what to do.
    """
    if path.suffix not in (".png", ".html", ".svg"):
        raise ValueError(f"charts are written to .png, .html or .svg files, not to {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no directory {str(path.parent)!r}")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "PNG files need matplotlib: pip install 'tokenflow[plot]'; or give a .html file, which needs "
            "nothing"
        )


def _drawn(line: Line, color: str, index: int, place: _Place) -> list[str]:
    spots = [(x, *place(x, y)) for x, y in line.points.items()]
    path = " ".join(f"{across},{up}" for _, across, up in spots)
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>']
    for x, across, up in () if line.dashed else spots:
        size = 6 if x == line.marked else 3
        parts.append(f'<circle cx="{across}" cy="{up}" r="{size}" fill="{color}"/>')
    height = _TOP + 10 + 18 * index
    parts.append(
        f'<path d="M{_WIDTH - _RIGHT + 14} {height}h22" stroke="{color}" stroke-width="2.5"{dashes}/>'
    )
    parts.append(_text(_WIDTH - _RIGHT + 42, height + 4, line.name, "start"))
    return parts


def _text(across: float, up: float, text: str, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{across:g}" y="{up:g}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below ``low`` to above ``high``, about five of them."""
    span = max(high - low, abs(high) * 1e-3, 1e-9)
    magnitude = 10.0 ** math.floor(math.log10(span / _TICKS))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if span / (m * magnitude) <= _TICKS)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 10) for n in range(first, max(last, first + 1) + 1)]


def _write_png(charts: Sequence[Chart], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(charts), 1, squeeze=False, figsize=(8, 4.5 * len(charts)))
    for chart, axis in zip(charts, axes[:, 0], strict=True):
        for index, line in enumerate(chart.lines):
            color = _COLORS[index % len(_COLORS)]
            style = "--" if line.dashed else "-"
            axis.plot(line.points.keys(), line.points.values(), style, color=color, label=line.name)
            if line.marked is not None:
                axis.plot([line.marked], [line.points[line.marked]], "o", color=color)
        axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        axis.locator_params(axis="x", integer=True)
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
