"""Record of a run: `metrics.jsonl`, one line per logged step and per evaluation, and the curves drawn from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from acc_lm.files import to_json
from acc_lm.run_files.names import CHECKPOINTS, MANIFEST, METRICS, PICTURE, SAMPLES


def append(output_dir: Path, step: int, metrics: dict[str, float]) -> None:
    """Append one line of plain floats, the step first; nan and infinity are written as null."""
    with (output_dir / METRICS).open("a") as file:
        file.write(to_json({"step": step, **metrics}) + "\n")


def read(output_dir: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """Read all intact lines, with nan for null; lines damaged by a killed process or a power cut are skipped."""
    try:
        lines = (output_dir / name).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append({key: math.nan if value is None else value for key, value in entry.items()})
    return entries


def newest_checkpoint(output_dir: Path) -> Path | None:
    """Checkpoint folder of the highest step with a manifest, None without any; no file in it is read."""
    manifests = (output_dir / CHECKPOINTS).resolve().glob(f"step-*/{MANIFEST}")
    steps = {file.parent.name.removeprefix("step-"): file.parent for file in manifests}
    return max(((int(step), folder) for step, folder in steps.items() if step.isdecimal()), default=(0, None))[1]


def gain(metric: str, value: float) -> float:
    """Value with its sign set so that more is better: all but accuracies (losses, perplexities, bits) are negated."""
    return value if metric.endswith("accuracy") else -value


def best(entries: Iterable[dict[str, Any]], metric: str) -> dict[str, Any] | None:
    """First of the best values of a metric, with its step; None when the metric has no finite value."""
    steps, values = series(entries, metric)
    finite = [
        (gain(metric, value), -step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)
    ]
    if not finite:
        return None
    _, minus_step, value = max(finite)
    return {"metric": metric, "value": value, "step": -minus_step}


def evaluation_at(output_dir: Path, step: int, metric: str) -> dict[str, float] | None:
    """Last evaluation recorded at this step; None when none measured `metric`."""
    found = [entry for entry in read(output_dir) if entry["step"] == step and metric in entry]
    return found[-1] if found else None


def epochs(entries: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    """Table of the passes over the training rows: a dict by column name for each pass."""
    names = ("number", "train_loss", "eval_loss", "learning_rate", "seconds")
    return [
        {"step": entry["step"], **{name: entry[f"epoch/{name}"] for name in names if f"epoch/{name}" in entry}}
        for entry in entries
        if "epoch/number" in entry
    ]


def keep_until(output_dir: Path, step: int) -> None:
    """Drop entries after `step`: the run resumes there and will log them again."""
    _write(output_dir, METRICS, [entry for entry in read(output_dir) if entry["step"] <= step])
    if (output_dir / SAMPLES).exists():
        _write(output_dir, SAMPLES, [entry for entry in read(output_dir, SAMPLES) if entry["step"] <= step])


def replace_samples(output_dir: Path, step: int, samples: list[dict[str, Any]]) -> None:
    """Write the samples of this step in place of earlier ones: a run killed after this step repeats it when resumed."""
    _write(output_dir, SAMPLES, [entry for entry in read(output_dir, SAMPLES) if entry["step"] != step] + samples)


def _write(output_dir: Path, name: str, entries: list[dict[str, Any]]) -> None:
    temporary = output_dir / f".{name}"
    temporary.write_text("".join(to_json(entry) + "\n" for entry in entries))
    os.replace(temporary, output_dir / name)


def series(entries: Iterable[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    pairs = [(entry["step"], entry[name]) for entry in entries if isinstance(entry.get(name), (int, float))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def sets(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Names of the evaluation sets, in the order of their first evaluation."""
    parts = (name.split("/") for entry in entries for name in entry)
    return list(dict.fromkeys(part[1] for part in parts if part[0] == "eval" and len(part) == 3))


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each position."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def draw_curves(output_dir: Path, title: str, best_metric: str = "eval/loss") -> None:
    """Draw `training_curves.png`: training loss, evaluation losses with the best evaluation marked, learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    entries = read(output_dir)
    figure, (train, evaluation, rate) = plt.subplots(1, 3, figsize=(15, 4))
    figure.subplots_adjust(
        left=0.05, right=0.985, bottom=0.13, top=0.84, wspace=0.2
    )  # a layout engine would draw everything twice
    figure.suptitle(title, parse_math=False)  # a $ in a name starts no formula
    steps, losses = series(entries, "train/loss")
    train.plot(steps, losses, color="tab:blue", alpha=0.3, marker="." if len(steps) < 3 else None, label="logged steps")
    train.plot(steps, smooth(losses, max(1, len(losses) // 20)), color="tab:blue", label="smoothed")
    train.set_title("Training loss", y=1.0)  # finding an automatic height takes as long as all other drawing
    train.set_ylabel("nats per target")
    eval_steps, eval_losses = series(entries, "eval/loss")
    evaluation.plot(eval_steps, eval_losses, color="tab:orange", marker="o", markersize=4, label="held-out text")
    for name in sets(entries):
        evaluation.plot(*series(entries, f"eval/{name}/loss"), marker=".", linewidth=1, alpha=0.7, label=name)
    found = best(entries, best_metric)
    if found and found["step"] in eval_steps:
        height = eval_losses[eval_steps.index(found["step"])]
        what = "best" if best_metric == "eval/loss" else f"best {best_metric.removeprefix('eval/')}"
        evaluation.axhline(height, color="tab:green", linestyle="--", linewidth=1)
        evaluation.plot(
            found["step"],
            height,
            "*",
            color="tab:green",
            markersize=14,
            label=f"{what} {found['value']:.4f} at step {found['step']}",
        )
    evaluation.set_title("Evaluation loss", y=1.0)
    evaluation.set_ylabel("nats per target")
    rate_steps, rates = series(entries, "train/learning_rate")
    rate.plot(rate_steps, rates, color="tab:red", marker="." if len(rate_steps) < 3 else None, label="learning rate")
    if any(value > 0 for value in rates):
        rate.set_yscale("log")
        rate.yaxis.set_major_formatter("{x:g}")
        if max(rates) >= 100 * min(value for value in rates if value > 0):  # else only minor ticks have labels
            rate.yaxis.set_minor_formatter(NullFormatter())
    rate.set_title("Learning rate", y=1.0)
    for axes in (train, evaluation, rate):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    temporary = output_dir / f".{PICTURE}"
    figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
    os.replace(temporary, output_dir / PICTURE)
