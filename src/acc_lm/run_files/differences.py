"""Differences between the curves of two runs, and the tolerance that rounding explains."""

from __future__ import annotations

from pathlib import Path

from acc_lm.config import Config
from acc_lm.run_files import metrics_file

COMPARED = ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss")
# Largest relative difference that rounding explains, after 20 steps: measured (see docs/promises/parity.md) and rounded up.
TOLERANCE: dict[str, dict[str, float]] = {
    "no": {"train/loss": 1e-5, "train/grad_norm": 1e-5, "train/learning_rate": 0.0, "eval/loss": 1e-6},
    "bf16": {"train/loss": 2e-4, "train/grad_norm": 1e-2, "train/learning_rate": 0.0, "eval/loss": 2e-4},
    "fp16": {"train/loss": 2e-4, "train/grad_norm": 1e-2, "train/learning_rate": 0.0, "eval/loss": 2e-4},
    "fp8": {"train/loss": 5e-2, "train/grad_norm": 2e-1, "train/learning_rate": 0.0, "eval/loss": 5e-2},
}
OF_MUON = {"train/grad_norm": 1e-3, "eval/loss": 1e-5}
"""Wider tolerance for Muon, whose iteration is in 16 bits: gradients that differ in the last bit may round apart."""


def largest_differences(expected: dict[int, dict[str, float]], got: dict[int, dict[str, float]]) -> dict[str, float]:
    """Largest relative difference of each compared metric over all steps; infinite where a value is missing or nan.

    Args:
        expected: metrics by step, as in `metrics.jsonl`.
        got: metrics by step of the other run.
    """
    worst: dict[str, float] = {}
    for step in expected.keys() | got.keys():
        for name in COMPARED:
            value, other = expected.get(step, {}).get(name), got.get(step, {}).get(name)
            if value is None and other is None:
                continue
            difference = (
                float("inf")
                if value is None or other is None
                else abs(other - value) / max(abs(value), 1e-30)
                if other != value
                else 0.0
            )
            worst[name] = max(worst.get(name, 0.0), difference if difference == difference else float("inf"))
    return worst


def read_metrics(output_dir: Path) -> dict[int, dict[str, float]]:
    """Entries of `metrics.jsonl`, merged by step."""
    by_step: dict[int, dict[str, float]] = {}
    for entry in metrics_file.read(output_dir):
        by_step.setdefault(int(entry["step"]), {}).update(entry)
    return by_step


def tolerance_of(config: Config) -> dict[str, float]:
    """Largest relative difference allowed between curves of this recipe, by metric."""
    return tolerance_for(config.training.mixed_precision or "no", config.optimizer.name)


def tolerance_for(precision: str, optimizer: str) -> dict[str, float]:
    """Largest relative difference allowed between curves of this precision and optimizer, by metric."""
    of_optimizer = OF_MUON if optimizer == "muon" else {}
    return {name: max(bound, of_optimizer.get(name, 0.0)) for name, bound in TOLERANCE[precision].items()}
