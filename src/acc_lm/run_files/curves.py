"""`training_curves.png`: a run at a glance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acc_lm.run_files.metrics_file import best, read, series, sets
from acc_lm.run_files.names import PICTURE

GAIN = 100
"""Ratio of the largest to the smallest gradient norm from which its scale is logarithmic."""


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the values at most `window` places before and after each, so that a smoothed curve does not lag."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    ends = [(max(0, i - window), min(len(values), i + window + 1)) for i in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in ends]


def draw_curves(
    output_dir: Path,
    title: str,
    best_metric: str = "eval/loss",
    compressors: Mapping[str, float] | None = None,
    resumed_at: Sequence[int] = (),
) -> None:
    """Draw `training_curves.png`: losses, bits per byte, learning rate, gradient norm and speed.

    Args:
        compressors: bits per byte of other compressors on the same held-out text, by name.
        resumed_at: steps after which the run was resumed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    entries = read(output_dir)
    figure, axes = plt.subplots(2, 3, figsize=(15, 7.5))
    # A layout engine would draw everything twice.
    figure.subplots_adjust(left=0.05, right=0.985, bottom=0.075, top=0.9, wspace=0.2, hspace=0.3)
    figure.suptitle(title, parse_math=False)  # a $ in a name starts no formula
    (train, evaluation, bits), (rate, norm, speed) = axes
    _draw_series(train, entries, "train/loss", "Training loss", "nats per target", "tab:blue", smoothed=True)
    _draw_evaluations(evaluation, entries, best_metric)
    _draw_bits(bits, entries, compressors or {})
    _draw_series(rate, entries, "train/learning_rate", "Learning rate", "", "tab:red")
    rate.set_ylim(bottom=0)
    _draw_series(norm, entries, "train/grad_norm", "Gradient norm, before clipping", "", "tab:purple", smoothed=True)
    norms = [value for value in series(entries, "train/grad_norm")[1] if value > 0]
    if norms and max(norms) >= GAIN * min(norms):
        norm.set_yscale("log")
    _draw_series(speed, entries, "train/tokens_per_second", "Speed", "tokens per second", "tab:gray", smoothed=True)
    speed.set_ylim(bottom=0)
    for each in axes.flat:
        for number, step in enumerate(resumed_at):
            each.axvline(step, color="black", linestyle=":", linewidth=1, label="resumed" if number == 0 else None)
        each.set_xlabel("optimizer step")
        each.grid(alpha=0.3)
        if each.lines:
            each.legend()
    temporary = output_dir / f".{PICTURE}"
    figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
    os.replace(temporary, output_dir / PICTURE)


def _draw_series(
    axes: Any, entries: list[dict[str, Any]], name: str, title: str, unit: str, color: str, *, smoothed: bool = False
) -> None:
    steps, values = series(entries, name)
    marker = "." if len(steps) < 3 else None
    axes.plot(steps, values, color=color, alpha=0.3 if smoothed else 1, marker=marker, label="logged steps")
    if smoothed:
        axes.plot(steps, smooth(values, len(values) // 40), color=color, label="smoothed")
    axes.set_title(title, y=1.0)  # finding an automatic height takes as long as all other drawing
    axes.set_ylabel(unit)


def _draw_evaluations(axes: Any, entries: list[dict[str, Any]], best_metric: str) -> None:
    """Draw the held-out loss of the run and of its evaluation sets, with the best evaluation marked."""
    steps, losses = series(entries, "eval/loss")
    axes.plot(steps, losses, color="tab:orange", marker="o", markersize=4, label="held-out text")
    for name in sets(entries):
        axes.plot(*series(entries, f"eval/{name}/loss"), marker=".", linewidth=1, alpha=0.7, label=name)
    found = best(entries, best_metric)
    if found and found["step"] in steps:
        height = losses[steps.index(found["step"])]
        what = "best" if best_metric == "eval/loss" else f"best {best_metric.removeprefix('eval/')}"
        label = f"{what} {found['value']:.4f} at step {found['step']}"
        axes.axhline(height, color="tab:green", linestyle="--", linewidth=1)
        axes.plot(found["step"], height, "*", color="tab:green", markersize=14, label=label)
    axes.set_title("Evaluation loss", y=1.0)
    axes.set_ylabel("nats per target")


def _draw_bits(axes: Any, entries: list[dict[str, Any]], compressors: Mapping[str, float]) -> None:
    """Draw the compression of the held-out text, next to that of other compressors."""
    steps, values = series(entries, "eval/bits_per_byte")
    if steps:
        axes.plot(steps, values, color="tab:green", marker="o", markersize=4, label="this model")
        for (name, value), style in zip(compressors.items(), ("--", "-."), strict=False):
            axes.axhline(value, color="black", linestyle=style, linewidth=1, alpha=0.7, label=f"{name} {value:.2f}")
    axes.set_title("Held-out text, compressed", y=1.0)
    axes.set_ylabel("bits per byte")
