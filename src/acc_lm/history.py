"""The record of a run: `metrics.jsonl`, one line per logged step and per evaluation, and the picture made from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
PICTURE = "training_curves.png"


def append(output_dir: Path, step: int, metrics: dict[str, float]) -> None:
    """Add one line; plain floats, the step first."""
    with (output_dir / FILE).open("a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


def read(output_dir: Path) -> list[dict[str, Any]]:
    """All whole lines; a line that a killed process left half written is passed over."""
    try:
        lines = (output_dir / FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def keep_until(output_dir: Path, step: int) -> None:
    """Drop what was logged after `step`: the run goes on from there and will log it again."""
    kept = [entry for entry in read(output_dir) if entry["step"] <= step]
    temporary = output_dir / f".{FILE}"
    temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    os.replace(temporary, output_dir / FILE)


def has_evaluation(output_dir: Path, step: int) -> bool:
    return any(entry["step"] == step and "eval/loss" in entry for entry in read(output_dir))


def series(entries: Iterable[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    pairs = [(entry["step"], entry[name]) for entry in entries if name in entry]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def draw(output_dir: Path, title: str) -> None:
    """Draw `training_curves.png`: training loss, evaluation loss with the best marked, learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    entries = read(output_dir)
    figure, (train, evaluation, rate) = plt.subplots(1, 3, figsize=(15, 4))
    figure.subplots_adjust(
        left=0.05, right=0.985, bottom=0.13, top=0.84, wspace=0.2
    )  # a layout engine draws it all twice
    figure.suptitle(title, parse_math=False)  # a name with $ is no formula
    steps, losses = series(entries, "train/loss")
    train.plot(steps, losses, color="tab:blue", alpha=0.3, marker="." if len(steps) < 3 else None, label="logged steps")
    train.plot(steps, smooth(losses, max(1, len(losses) // 20)), color="tab:blue", label="smoothed")
    train.set(title="Training loss", ylabel="nats per target")
    eval_steps, eval_losses = series(entries, "eval/loss")
    evaluation.plot(eval_steps, eval_losses, color="tab:orange", marker="o", markersize=4, label="held-out text")
    if eval_losses:
        best = min(range(len(eval_losses)), key=eval_losses.__getitem__)
        evaluation.axhline(eval_losses[best], color="tab:green", linestyle="--", linewidth=1)
        evaluation.plot(
            eval_steps[best],
            eval_losses[best],
            "*",
            color="tab:green",
            markersize=14,
            label=f"best {eval_losses[best]:.4f} at step {eval_steps[best]}",
        )
    evaluation.set(title="Evaluation loss", ylabel="nats per target")
    rate_steps, rates = series(entries, "train/learning_rate")
    rate.plot(rate_steps, rates, color="tab:red", marker="." if len(rate_steps) < 3 else None, label="learning rate")
    if any(value > 0 for value in rates):
        rate.set_yscale("log")
    rate.set(title="Learning rate")
    for axes in (train, evaluation, rate):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    temporary = output_dir / f".{PICTURE}"
    figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
    os.replace(temporary, output_dir / PICTURE)
