"""`training_curves.png`: a run at a glance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acc_lm.redaction import printable, redact
from acc_lm.run_files.charts import Chart, Drawn, Line, Mark, charts_of, marks_of
from acc_lm.run_files.columns import MetricColumns
from acc_lm.run_files.metrics_file import read
from acc_lm.run_files.names import PICTURE

PALETTE = (
    "#2f7ebc",
    "#d9822b",
    "#2f9e55",
    "#9b5fc0",
    "#cf4646",
    "#808080",
    "#1f9e9e",
    "#8a6d3b",
)
"""Colours of lines that are readable on white and on black, by the numbers of `charts`."""
LEVEL_STYLES = ("--", "-.")


def draw_curves(
    output_dir: Path,
    title: str,
    best_metric: str = "eval/loss",
    compressors: Mapping[str, float] | None = None,
    resumes: Sequence[tuple[int, str]] = (),
) -> None:
    """Draw `training_curves.png`: losses, bits per byte, learning rate, gradient norm and speed.

    Args:
        compressors: bits per byte of other compressors on the same held-out text, by name.
        resumes: (step, label) of each resume.
    """
    columns = MetricColumns().add(read(output_dir))
    run = Drawn(title, columns, best_metric, compressors, resumes)
    draw_charts(charts_of([run]), marks_of([run]), title, output_dir / PICTURE)


def draw_charts(
    charts: Sequence[Chart], marks: Sequence[Mark], title: str, file: Path, x_label: str = "optimizer step"
) -> None:
    """Draw six charts into a PNG file, which is replaced at once."""
    os.environ["MPLBACKEND"] = "Agg"  # that of a notebook may be unknown to a run that it starts in another environment
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 7.5))
    # A layout engine would draw everything twice.
    figure.subplots_adjust(left=0.05, right=0.985, bottom=0.075, top=0.9, wspace=0.2, hspace=0.3)
    figure.suptitle(title, parse_math=False)  # a $ in a name starts no formula
    for each, chart in zip(axes.flat, charts, strict=True):
        _draw(each, chart)
        for number, mark in enumerate(marks):
            is_new = mark.label not in {earlier.label for earlier in marks[:number]}
            color = "black" if mark.color is None else PALETTE[mark.color % len(PALETTE)]
            label = printable(redact(mark.label)) if is_new else None
            each.axvline(mark.x, color=color, linestyle=":", linewidth=1, label=label)
        each.set_xlabel(x_label)
        each.grid(alpha=0.3)
        if each.lines:
            each.legend()
            for text in each.get_legend().get_texts():
                text.set_parse_math(False)
    temporary = file.with_name(f".{file.name}")
    figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
    os.replace(temporary, file)


def _draw(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        _draw_line(axes, line)
    for number, level in enumerate(chart.levels):
        style = LEVEL_STYLES[number % len(LEVEL_STYLES)]
        axes.axhline(level.value, color="black", linestyle=style, linewidth=1, alpha=0.7, label=level.label)
    if chart.star:
        axes.axhline(chart.star.y, color=PALETTE[2], linestyle="--", linewidth=1)
        axes.plot(chart.star.x, chart.star.y, "*", color=PALETTE[2], markersize=14, label=chart.star.label)
    if chart.is_log:
        axes.set_yscale("log")
    if chart.doubles_x:
        axes.set_xscale("log", base=2)
    if chart.begins_at_zero:
        axes.set_ylim(bottom=0)
    axes.set_title(chart.title, y=1.0)  # finding an automatic height takes as long as all other drawing
    axes.set_ylabel(chart.unit)


def _draw_line(axes: Any, line: Line) -> None:
    alpha, marker = (0.3 if line.is_faint else 1), "." if line.has_points else None
    label = printable(redact(line.label))
    label = f" {label}" if label.startswith("_") else label  # matplotlib hides such labels
    color, style = PALETTE[line.color % len(PALETTE)], "--" if line.is_dashed else "-"
    axes.plot(line.xs, line.ys, color=color, alpha=alpha, marker=marker, linestyle=style, label=label)
