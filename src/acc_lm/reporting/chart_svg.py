"""A chart as inline SVG of a phone's width, in colours that are readable on white and on black."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

import numpy as np

from acc_lm.run_files.charts import Chart, Line, Mark
from acc_lm.run_files.columns import Floats
from acc_lm.run_files.curves import PALETTE

CHART_WIDTH, CHART_HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 8, 24
MANY_MARKS = 4
"""Number of marks up to which each has its text in the chart."""
DASHES = ("7 4", "7 3 2 3", "2 3")


def as_svg(chart: Chart, marks: Sequence[Mark], title: str) -> str:
    """SVG element of one chart; its attributes let a script find the values under the pointer."""
    x_range, y_range = _ranges(chart, marks)
    left, right = (math.log2(end) for end in x_range) if chart.doubles_x else x_range
    to_place = _scale(left, right, LEFT, CHART_WIDTH - RIGHT)
    low, high = (math.log10(end) for end in y_range) if chart.is_log else y_range
    to_height = _scale(low, high, CHART_HEIGHT - BOTTOM, TOP)

    def to_x(values: Floats) -> Floats:
        return to_place(np.log2(values) if chart.doubles_x else values)

    def to_y(values: Floats) -> Floats:
        if chart.is_log:
            values = np.log10(np.maximum(values, y_range[0]))
        return to_height(values)

    parts = [*_grid(chart, x_range, y_range, to_x, to_y)]
    parts += [_path(line, to_x, to_y) for line in chart.lines]
    for number, level in enumerate(chart.levels):
        y = to_y(np.array([level.value]))[0]
        dashes = DASHES[number % len(DASHES)]
        parts.append(
            f'<line class=level x1={LEFT} x2={CHART_WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} stroke-dasharray="{dashes}"/>'
            f"<text class=note x={CHART_WIDTH - RIGHT} y={y - 3:.1f} text-anchor=end>{html.escape(level.label)}</text>"
        )
    if chart.star:
        x, y = to_x(np.array([chart.star.x]))[0], to_y(np.array([chart.star.y]))[0]
        parts.append(f"<text class=star x={x:.1f} y={y + 6:.1f}>★</text>")
    parts += _marks(marks, to_x)
    scale = f"{left!r} {right!r} {low!r} {high!r} {int(chart.is_log)} {int(chart.doubles_x)}"
    return (
        f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role=img aria-label="{html.escape(title)}" data-scale="{scale}">'
        f"{''.join(parts)}</svg>"
    )


def _scale(low: float, high: float, first: float, last: float) -> Callable[[Floats], Floats]:
    return lambda values: first + (values - low) / (high - low) * (last - first)


def _ranges(chart: Chart, marks: Sequence[Mark]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Lowest and highest x and y, never equal."""
    xs = np.concatenate([*(line.xs for line in chart.lines), [mark.x for mark in marks]])
    first, last = float(xs.min()), float(xs.max())
    x_range = (first, max(last, 2 * first)) if chart.doubles_x else _apart(min(0.0, first), last)
    ys = np.concatenate([*(line.ys for line in chart.lines), [level.value for level in chart.levels]])
    if chart.is_log:
        ys = ys[ys > 0]
        low, high = float(ys.min()), float(ys.max())
        return x_range, (low / 1.1, high * 1.1)
    low, high = float(ys.min()), float(ys.max())
    low = min(0.0, low) if chart.begins_at_zero else low - 0.05 * (high - low)
    return x_range, _apart(low, high + 0.05 * (high - low))


def _apart(low: float, high: float) -> tuple[float, float]:
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    room = abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - room), high + room


def _path(line: Line, to_x: Callable[[Floats], Floats], to_y: Callable[[Floats], Floats]) -> str:
    xs, ys = to_x(line.xs), to_y(line.ys)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    color = PALETTE[line.color % len(PALETTE)]
    name = html.escape(line.label)
    if line.is_area:
        area = f"{xs[0]:.1f},{CHART_HEIGHT - BOTTOM} {points} {xs[-1]:.1f},{CHART_HEIGHT - BOTTOM}"
        return f'<polygon points="{area}" fill="{color}" data-name="{name}"/>'
    kind = "faint" if line.is_faint else "line"
    dashes = f' stroke-dasharray="{DASHES[0]}"' * line.is_dashed
    drawn = f'<polyline class={kind} points="{points}" stroke="{color}"{dashes} data-name="{name}"/>'
    if line.has_points:
        drawn += "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in zip(xs, ys, strict=True)
        )
    return drawn


def _marks(marks: Sequence[Mark], to_x: Callable[[Floats], Floats]) -> list[str]:
    parts = []
    for mark in marks:
        x = to_x(np.array([mark.x]))[0]
        stroke = "" if mark.color is None else f' style="stroke:{PALETTE[mark.color % len(PALETTE)]}"'
        parts.append(
            f"<line class=mark{stroke} x1={x:.1f} x2={x:.1f} y1={TOP} y2={CHART_HEIGHT - BOTTOM}><title>{html.escape(mark.label)}</title></line>"
        )
        _, _, engine = mark.label.rpartition("resumed on ")
        if len(marks) <= MANY_MARKS and engine != mark.label:
            where = f"translate({x - 5:.1f} {TOP + 2}) rotate(-90)"
            parts.append(f'<text class=note transform="{where}" text-anchor=end>{html.escape(engine)}</text>')
    return parts


# --- axes ----------------------------------------------------------------------------------------------------------


def _grid(
    chart: Chart,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    to_x: Callable[[Floats], Floats],
    to_y: Callable[[Floats], Floats],
) -> list[str]:
    parts = []
    for value in log_ticks(*y_range) if chart.is_log else ticks(*y_range, 5):
        y = to_y(np.array([value]))[0]
        parts.append(f"<line class=grid x1={LEFT} x2={CHART_WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} />")
        parts.append(f"<text x={LEFT - 5} y={y + 4:.1f} text-anchor=end>{short(value)}</text>")
    for value in doublings(*x_range) if chart.doubles_x else ticks(*x_range, 5):
        x = to_x(np.array([value]))[0]
        anchor = "end" if x > CHART_WIDTH - 20 else "middle"
        parts.append(f"<text x={x:.1f} y={CHART_HEIGHT - 8} text-anchor={anchor}>{short(value)}</text>")
    parts.append(
        f"<line class=axis x1={LEFT} x2={CHART_WIDTH - RIGHT} y1={CHART_HEIGHT - BOTTOM} y2={CHART_HEIGHT - BOTTOM} />"
    )
    return parts


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values, at most about `count`, from `low` to `high`."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * count >= high - low)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from `low` to `high`, at most about six."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / 6))
    return [10.0**power for power in range(first, last + 1, every)]


def doublings(low: float, high: float) -> list[float]:
    """Powers of two from `low` to `high`, at most about seven."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / 7))
    return [2.0**power for power in range(first, last + 1, every)]


def short(value: float) -> str:
    """Number of a few characters: 1500000 -> 1.5M, 0.0005 -> 5e-4."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if limit <= size < 1e15:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.4g}{unit}"
    if size >= 1e15 or size < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:.4g}"
