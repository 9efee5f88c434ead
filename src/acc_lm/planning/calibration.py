"""Measured steps, kept on this machine: ratios by which the speed model errs for a model, row length, dtype and GPU.

A ratio holds for these alone. On the published runs it leaves a median error of 2 % within one model and row length, but
taken over to another model on the same GPU it makes predictions worse (6.6 % instead of 4.7 %).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from acc_lm.cache import cache_folder
from acc_lm.errors import warn_once
from acc_lm.planning.hardware import Gpu
from acc_lm.planning.shapes import Shape

PLAUSIBLE = (0.1, 30.0)
"""Ratios outside of this range come from something else than the speed of a GPU."""


def calibration_file() -> Path:
    """File with one line of JSON for each measured step, the newest last."""
    return cache_folder() / "measured_steps.jsonl"


def key_of(gpu: Gpu, shape: Shape, length: int, compute: str) -> dict[str, Any]:
    """Everything that a ratio holds for."""
    return {"gpu": gpu.device, "shape": asdict(shape), "sequence_length": length, "compute": compute}


def keep_ratio(gpu: Gpu, shape: Shape, length: int, compute: str, ratio: float, **facts: Any) -> None:
    """Add a measured step.

    Args:
        ratio: measured seconds over predicted ones.
        facts: what was measured, for people who read the file.
    """
    file = calibration_file()
    line = json.dumps({**key_of(gpu, shape, length, compute), "ratio": ratio, **facts})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as output:
            output.write(line + "\n")
    except OSError as error:  # the comparison is still worth printing
        warn_once(f"{file} must be writable, got: {error}; later plans will not know this measurement")


def known_ratio(gpu: Gpu, shape: Shape, length: int, compute: str) -> float | None:
    """Newest ratio for this model, row length, dtype and GPU; None: nothing was measured."""
    file, key, found = calibration_file(), key_of(gpu, shape, length, compute), None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        warn_once(f"{file} must be readable, got: {error}; the plan uses no measured step")
        return None
    for line in lines:
        try:
            entry = json.loads(line)
            if all(entry[name] == value for name, value in key.items()):
                ratio = float(entry["ratio"])
                found = ratio if PLAUSIBLE[0] <= ratio <= PLAUSIBLE[1] else found
        except (ValueError, KeyError, TypeError):
            warn_once(f"{file} must have a measured step on each line, got {line[:60]!r}; delete that line")
    return found
