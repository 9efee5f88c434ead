"""Answers of a learner: read from the command line or from the folder of a run, and judged by an exercise.

An exercise is a function `exercise_1(answer: str) -> str` in `exercises_02.py`. It returns what to learn from a right answer,
raises `NotYet` with a hint for a wrong one, and `BadAnswer` for one that cannot be read. Its docstring is the question.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class NotYet(Exception):
    """A wrong answer; the message is a hint that does not contain the right one."""


class BadAnswer(Exception):
    """An answer that cannot be read: `X must be Y, got Z; do W`."""


def number(answer: str) -> float:
    """A number, with or without thousands separators and a percent sign."""
    try:
        return float(answer.replace(",", "").rstrip("%"))
    except ValueError:
        raise BadAnswer(f"the answer must be a number, got {answer}; give digits only") from None


def whole_number(answer: str) -> int:
    if not (value := number(answer)).is_integer():
        raise BadAnswer(f"the answer must be a whole number, got {answer}; give digits only")
    return int(value)


def choice(answer: str, *choices: str) -> str:
    if (value := answer.strip().lower()) not in choices:
        raise BadAnswer(f"the answer must be one of {', '.join(choices)}, got {answer}; give one of these words")
    return value


def run(folder: str) -> Path:
    """The folder of a run that has finished."""
    path = Path(folder)
    if not (path / "summary.json").is_file():
        raise BadAnswer(f"the answer must be the folder of a finished run, got {folder}; give the run's output_dir")
    if (status := summary(path)["status"]) != "completed":
        raise NotYet(f"{folder} ended with status {status}: run the same command again until it is completed")
    return path


def needed(folder: Path, section: int) -> Path:
    """The folder of a run that an exercise needs besides the answer, trained in a section of the lab."""
    if not (folder / "summary.json").is_file():
        raise BadAnswer(
            f"{folder} must be there to check this answer, got nothing; run the commands of section {section} first"
        )
    return run(str(folder))


def summary(run_folder: Path) -> dict[str, Any]:
    return _json(run_folder / "summary.json")


def environment(run_folder: Path) -> dict[str, Any]:
    return _json(run_folder / "environment.json")


def recipe(run_folder: Path) -> dict[str, Any]:
    """The resolved recipe, as nested mappings."""
    from acc_lm.config.loading import load_config

    return load_config(run_folder / "config.yaml").model_dump()


def curve(run_folder: Path, metric: str = "train/loss") -> dict[int, float]:
    """Values of a metric by step."""
    from acc_lm.run_files.metrics_file import read

    return {entry["step"]: entry[metric] for entry in read(run_folder) if metric in entry}


def largest_difference(first: dict[int, float], second: dict[int, float]) -> float:
    """Largest relative difference of two curves over the steps that both have; nan without such a step."""
    steps = first.keys() & second.keys()
    return max((abs(first[step] - second[step]) / abs(first[step]) for step in steps), default=float("nan"))


def _json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        raise BadAnswer(f"{file} must be a JSON file of a run, got none; run the lab's command again") from None
    return found
