"""Charts of one or several runs as plain data: lines, levels and marks, which a page and a picture draw alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from acc_lm.run_files.columns import Curve, Floats, MetricColumns
from acc_lm.run_files.metrics_file import gain

GAIN = 100
"""Ratio of the largest to the smallest value from which a scale is logarithmic."""
PIXEL_COLUMNS = 240
"""MetricColumns of pixels over which a line is thinned to the lowest and the highest value of each."""
MAX_SETS, LONGEST_NAME = 30, 80
"""Number of evaluation sets that are drawn, and the characters of a name."""
SMOOTHED_PARTS = 40
"""A smoothed line is the mean over this part of the run before and after each step."""
BLUE, ORANGE, GREEN, PURPLE, RED, GRAY, TEAL, BROWN = range(8)
"""Numbers of the colours of lines; runs of a comparison take them in this order."""

By = Literal["step", "tokens", "time"]
AXES: dict[By, str] = {"step": "optimizer step", "tokens": "tokens", "time": "minutes of training"}
PARTS_OF_A_STEP = {"compute": BLUE, "communication": ORANGE, "waiting": PURPLE, "data": GREEN}
"""Parts of `train/seconds_per_step`, with the colour of each."""


@dataclass(frozen=True)
class Line:
    """Points of one curve; `faint` ones are the logged values under a smoothed line."""

    label: str
    xs: Floats
    ys: Floats
    color: int
    is_faint: bool = False
    has_points: bool = False
    is_area: bool = False
    """The area under this line is filled, for parts that add up."""
    is_dashed: bool = False


@dataclass(frozen=True)
class Level:
    """Horizontal line, such as another compressor's bits per byte."""

    label: str
    value: float


@dataclass(frozen=True)
class Star:
    """Best point of a chart."""

    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Mark:
    """Vertical line in every chart: the run was resumed there."""

    x: float
    label: str
    color: int | None = None
    """Number of the colour of its run, if there are several; None: that of text."""


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    lines: tuple[Line, ...] = ()
    levels: tuple[Level, ...] = ()
    star: Star | None = None
    is_log: bool = False
    begins_at_zero: bool = False
    doubles_x: bool = False
    """True: doubling is the same distance everywhere on the x axis."""


@dataclass(frozen=True)
class Drawn:
    """Curves of a run, and how to draw them."""

    name: str
    columns: MetricColumns
    best_metric: str = "eval/loss"
    compressors: Mapping[str, float] | None = None
    resumes: Sequence[tuple[int, str]] = ()
    """(step, label) of each resume."""

    def at(self, steps: Floats, by: By) -> Floats:
        """Steps on another axis: tokens trained on, or minutes of training, by interpolation between logged steps."""
        if by == "step" or not len(steps):
            return steps
        if by == "tokens":
            known = self.columns.curve("train/tokens")
        else:
            pace = self.columns.curve("train/seconds_per_step")
            known = Curve(pace.steps, np.cumsum(pace.values * np.diff(pace.steps, prepend=0.0)) / 60)
        if not len(known):
            return np.full(len(steps), np.nan)
        on_axis: Floats = np.interp(steps, np.append(0.0, known.steps), np.append(0.0, known.values))
        return on_axis


def smooth(values: Sequence[float] | Floats, window: int) -> list[float]:
    """Mean of the values at most `window` places before and after each, so that a smoothed curve does not lag."""
    sums = np.append(0.0, np.cumsum(np.asarray(values, dtype=float)))
    places = np.arange(len(values))
    first, last = np.maximum(places - window, 0), np.minimum(places + window + 1, len(values))
    smoothed: list[float] = ((sums[last] - sums[first]) / (last - first)).tolist()
    return smoothed


def thin(xs: Floats, ys: Floats, columns: int = PIXEL_COLUMNS) -> tuple[Floats, Floats]:
    """Points that look the same: of each column of pixels the first, lowest, highest and last, in their order."""
    if len(xs) <= 4 * columns or xs[-1] <= xs[0]:
        return xs, ys
    column = np.minimum(((xs - xs[0]) / (xs[-1] - xs[0]) * columns).astype(int), columns - 1)
    edges = np.flatnonzero(np.diff(column, prepend=-1))
    by_height = np.lexsort((ys, column))
    ends = np.append(edges[1:], len(xs)) - 1
    kept = np.unique(np.concatenate([edges, ends, by_height[edges], by_height[ends]]))
    return xs[kept], ys[kept]


def charts_of(runs: Sequence[Drawn], by: By = "step") -> list[Chart]:
    """Losses, bits per byte, learning rate, gradient norm and speed; of several runs, each in its own colour."""
    return [
        _trend(runs, by, "train/loss", "Training loss", "nats per target", BLUE),
        _evaluations(runs, by),
        _bits(runs, by),
        _trend(runs, by, "train/learning_rate", "Learning rate", "", RED, is_exact=True, begins_at_zero=True),
        _trend(runs, by, "train/grad_norm", "Gradient norm, before clipping", "", PURPLE),
        _trend(runs, by, "train/tokens_per_second", "Speed", "tokens per second", GRAY, begins_at_zero=True),
    ]


def more_charts_of(runs: Sequence[Drawn], by: By = "step") -> list[Chart]:
    """Parts of a step's time and memory, for a page; without those that a run did not log."""
    charts = [_parts_of_a_step(runs[0], by)] if len(runs) == 1 else []
    memory = _trend(runs, by, "train/memory_gb", "Peak memory so far", "GB", BROWN, is_exact=True, begins_at_zero=True)
    seconds = _trend(runs, by, "train/seconds_per_step", "Time of a step", "seconds", TEAL, begins_at_zero=True)
    return [chart for chart in (*charts, *([seconds] if len(runs) > 1 else []), memory) if chart.lines]


def marks_of(runs: Sequence[Drawn], by: By = "step") -> list[Mark]:
    """Resumes of the runs; of several, each in the colour of its run and with its name."""
    marks = []
    for number, run in enumerate(runs):
        name, color = ("", None) if len(runs) == 1 else (f"{run.name} ", number)
        places = run.at(np.array([float(step) for step, _ in run.resumes]), by)
        labels = [name + label for _, label in run.resumes]
        marks += [Mark(float(x), label, color) for x, label in zip(places, labels, strict=True) if np.isfinite(x)]
    return marks


def _curve(run: Drawn, name: str, by: By) -> tuple[Floats, Floats]:
    curve = run.columns.curve(name)
    xs = run.at(curve.steps, by)
    return xs[np.isfinite(xs)], curve.values[np.isfinite(xs)]


def _trend(
    runs: Sequence[Drawn],
    by: By,
    name: str,
    title: str,
    unit: str,
    color: int,
    *,
    is_exact: bool = False,
    begins_at_zero: bool = False,
) -> Chart:
    """Logged values with a smoothed line over them; of several runs only the smoothed lines."""
    lines = []
    for number, run in enumerate(runs):
        xs, ys = _curve(run, name, by)
        if not len(xs):
            continue
        own, is_short = (color if len(runs) == 1 else number), len(xs) < 3
        if len(runs) == 1:
            lines.append(Line("logged steps", *thin(xs, ys), own, is_faint=not is_exact, has_points=is_short))
        if len(runs) > 1 or not is_exact:
            window = 0 if is_exact else len(ys) // SMOOTHED_PARTS
            smoothed = thin(xs, np.array(smooth(ys, window)))
            lines.append(Line("smoothed" if len(runs) == 1 else run.name, *smoothed, own, has_points=is_short))
    return Chart(
        title, unit, tuple(lines), is_log=not begins_at_zero and _is_wide(lines), begins_at_zero=begins_at_zero
    )


def _is_wide(lines: Sequence[Line]) -> bool:
    """True when the positive values span so much that a linear scale would show only the largest."""
    values = np.concatenate([np.empty(0), *(line.ys for line in lines)])
    positive = values[values > 0]
    return len(positive) > 0 and bool(positive.max() >= GAIN * positive.min())


def _evaluations(runs: Sequence[Drawn], by: By) -> Chart:
    """Held-out loss of the runs; of a single one also its evaluation sets, and the best evaluation."""
    lines: list[Line] = []
    star = None
    for number, run in enumerate(runs):
        xs, ys = _curve(run, "eval/loss", by)
        if len(xs):
            label, color = ("held-out text", ORANGE) if len(runs) == 1 else (run.name, number)
            lines.append(Line(label, *thin(xs, ys), color, has_points=len(xs) <= PIXEL_COLUMNS))
    if len(runs) == 1:
        for number, name in enumerate(runs[0].columns.parts("eval", "/loss")[:MAX_SETS]):
            xs, ys = _curve(runs[0], f"eval/{name}/loss", by)
            color = (BLUE, GREEN, PURPLE, RED, TEAL, BROWN, GRAY)[number % 7]
            lines.append(Line(name[:LONGEST_NAME], *thin(xs, ys), color, has_points=len(xs) <= PIXEL_COLUMNS))
        star = _best(runs[0], by)
    return Chart("Evaluation loss", "nats per target", tuple(lines), star=star, is_log=_is_wide(lines))


def _best(run: Drawn, by: By) -> Star | None:
    """The best evaluation, at the height of its held-out loss."""
    metric, losses = run.best_metric, run.columns.curve("eval/loss")
    scores = run.columns.curve(metric)
    if not len(scores):
        return None
    place = int(np.argmax([gain(metric, float(value)) for value in scores.values]))
    step, value = float(scores.steps[place]), float(scores.values[place])
    if step not in losses.steps:
        return None
    height = float(losses.values[np.searchsorted(losses.steps, step)])
    what = "best" if metric == "eval/loss" else f"best {metric.removeprefix('eval/')}"
    return Star(f"{what} {value:.4f} at step {step:.0f}", float(run.at(np.array([step]), by)[0]), height)


def _bits(runs: Sequence[Drawn], by: By) -> Chart:
    """Compression of the held-out text, next to that of other compressors."""
    lines = []
    for number, run in enumerate(runs):
        xs, ys = _curve(run, "eval/bits_per_byte", by)
        if len(xs):
            label, color = ("this model", GREEN) if len(runs) == 1 else (run.name, number)
            lines.append(Line(label, *thin(xs, ys), color, has_points=len(xs) <= PIXEL_COLUMNS))
    shown = {name: value for run in reversed(runs) for name, value in (run.compressors or {}).items()} if lines else {}
    levels = tuple(Level(f"{name} {value:.2f}", value) for name, value in shown.items())
    return Chart("Held-out text, compressed", "bits per byte", tuple(lines), levels)


def _parts_of_a_step(run: Drawn, by: By) -> Chart:
    """Parts of a step's time, one on top of the other."""
    steps = run.columns.curve("train/seconds_per_step").steps
    window, total, lines = len(steps) // SMOOTHED_PARTS, np.zeros(len(steps)), []
    xs = run.at(steps, by)
    for part, color in PARTS_OF_A_STEP.items():
        curve = run.columns.curve(f"train/seconds_{part}")
        if len(curve) == len(steps) and curve.values.any() and np.isfinite(xs).all():
            total = total + np.maximum(curve.values, 0)
            lines.append(Line(part, *thin(xs, np.array(smooth(total, window))), color, is_area=True))
    return Chart("Time of a step", "seconds", tuple(reversed(lines)), begins_at_zero=True)
