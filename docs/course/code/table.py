"""Table of runs: what each changed compared with the first one, how fast it was, and whether the losses stayed the same.

python docs/course/code/table.py runs/course/base runs/course/bf16
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from answers import BadAnswer, curve, environment, largest_difference, recipe, run

WARM_UP = 2
"""First steps that are left out: caches, lazy allocation and compilation are paid there."""
NO_CHANGE = ("output_dir", "profile.steps", "profile")
HEAD = ("run", "changed", "ms, fastest", "ms, median", "compute", "communication", "GB", "loss differs by")


def main(folders: list[str]) -> int:
    try:
        runs = [run(folder) for folder in folders]
        if len(runs) < 2:
            raise BadAnswer(
                f"RUN must be the folders of at least two runs, got {len(runs)}; give the first one twice to see zeros"
            )
        rows = [row(runs[0], folder) for folder in runs]
    except BadAnswer as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    return 0


def row(first: Path, folder: Path) -> list[str]:
    step, compute, communication = (milliseconds(folder, name) for name in ("step", "compute", "communication"))
    memory = max(curve(folder, "train/memory_gb").values())
    difference = largest_difference(curve(first), curve(folder))
    changes = changed(first, folder) or ("nothing" if folder == first else "nothing, again")
    times = [f"{min(step):,.0f}", *(f"{statistics.median(values):,.0f}" for values in (step, compute, communication))]
    return [folder.name, changes, *times, f"{memory:.2f}", f"{difference:.0e}"]


def milliseconds(folder: Path, part: str) -> list[float]:
    """Milliseconds of each step after the warm-up, or of its part; communication includes waiting for the other process."""
    names = {"step": ("per_step",), "compute": ("compute",), "communication": ("communication", "waiting")}[part]
    curves = [curve(folder, f"train/seconds_{name}") for name in names]
    steps = [step for step in curve(folder, "train/seconds_per_step") if step > WARM_UP]
    if not steps:
        raise BadAnswer(
            f"RUN must have logged a step after step {WARM_UP}, got {folder}; train longer, with training.log_every=1"
        )
    return [1000 * sum(values.get(step, 0.0) for values in curves) for step in steps]


def changed(first: Path, folder: Path) -> str:
    """Keys of the recipe and options of the launch that differ from the first run's."""
    before, after = flat(recipe(first)), flat(recipe(folder))
    keys = [key for key in after if after[key] != before.get(key) and not key.startswith(NO_CHANGE)]
    found = [f"{key}={after[key]}" for key in keys]
    old, new = environment(first), environment(folder)
    found += [f"{new[name]} for {old[name]} processes" for name in ("num_processes",) if new[name] != old[name]]
    found += [note for note in new["notes"] if note.startswith("compiled") and note not in old["notes"]]
    return ", ".join(found)


def flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
