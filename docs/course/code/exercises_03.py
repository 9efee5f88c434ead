"""Exercises of lab 03: shares of a step, and settings that change no digit of the losses."""

from __future__ import annotations

import re
from pathlib import Path

from answers import BadAnswer, NotYet, curve, largest_difference, needed, number, recipe, run

BASE, PROFILED = Path("runs/course/base"), Path("runs/course/profiled")


def exercise_1(answer: str) -> str:
    """Which share of a step of runs/course/profiled, in percent, do communication and waiting take together?"""
    shares = shares_of(PROFILED)
    share, value = shares["communication"] + shares["waiting for others"], number(answer)
    if abs(value - share) <= 0.2:
        return f"{share:.1f} %: faster communication, of any kind, cannot save more"
    if abs(value / 100 - share) <= 0.2 or abs(value * 100 - share) <= 0.2:
        raise NotYet("the number is right, but the answer is in percent")
    raise NotYet(f"add up two lines of the column `share` in {PROFILED}/profile/summary.txt")


def exercise_2(answer: str) -> str:
    """Combine two settings that lower the memory of the activations and leave the losses of runs/course/base as they are.
    Answer: the folder of the run."""
    found, base = recipe(run(answer)), recipe(needed(BASE, 1))
    missing = []
    if not found["model"]["gradient_checkpointing"]:
        missing.append("one recomputes activations instead of keeping them")
    if found["training"]["micro_batch_size"] >= base["training"]["global_batch_size"] // 2:
        missing.append("one computes the rows of a step in several parts")
    if missing:
        raise NotYet(f"{'; '.join(missing)}: both are keys of section 3 or 4")
    if not (difference := largest_difference(curve(BASE), curve(Path(answer)))) < 1e-5:
        raise NotYet(f"the losses differ from those of {BASE} by {difference:.1e}: another key changes what is learned")
    return f"less memory, more time, and the losses differ by {difference:.1e}"


def exercise_3(answer: str) -> str:
    """If the compute of runs/course/profiled took half as long and all other parts the same: how many times as fast would a step be?"""
    share, value = shares_of(PROFILED)["compute"] / 100, number(answer)
    speed_up = 1 / (1 - share / 2)
    if abs(value - speed_up) <= 0.02 * speed_up:
        return f"1 / (1 - {share:.3f} / 2) = {speed_up:.2f}; only if compute were everything would it be 2"
    if value >= 2:
        raise NotYet(
            "a part that is halved cannot make the whole more than twice as fast, and this part is not the whole"
        )
    raise NotYet("the rest of the step keeps its time: divide the old time by the new one, both as shares of the step")


def shares_of(folder: Path) -> dict[str, float]:
    """Shares of a step, in percent, by the run's profile."""
    file = folder / "profile/summary.txt"
    if not file.is_file():
        raise BadAnswer(f"{file} must be a profile, got nothing there; train {folder} as in section 1")
    return {
        name.strip(): float(share)
        for name, share in re.findall(r"^(\S.*?)\s+[\d.]+\s+([\d.]+)%", file.read_text(), re.M)
    }
