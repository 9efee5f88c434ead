"""Record of a run: `metrics.jsonl`, one line per logged step and per evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from acc_lm.files import to_json
from acc_lm.run_files.names import CHECKPOINTS, MANIFEST, METRICS, SAMPLES


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
