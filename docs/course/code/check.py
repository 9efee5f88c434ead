"""Check the answer to an exercise of the course.

    python docs/course/code/check.py                     the exercises
    python docs/course/code/check.py 02.1                the question
    python docs/course/code/check.py 02.1 ANSWER         right (exit code 0), or not yet and a hint (exit code 1)

An answer is a number, a word or the folder of a run. One that cannot be read is exit code 2.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

from answers import BadAnswer, NotYet

FOLDER = Path(__file__).resolve().parent


def exercises() -> dict[str, Callable[[str], str]]:
    """Exercise by its number: 02.1 is `exercise_1` in exercises_02.py."""
    found = {}
    for file in sorted(FOLDER.glob("exercises_??.py")):
        module = importlib.import_module(file.stem)
        names = [name for name in vars(module) if re.fullmatch(r"exercise_\d", name)]
        found |= {f"{file.stem[-2:]}.{name[-1]}": getattr(module, name) for name in sorted(names)}
    return found


def question(exercise: Callable[[str], str]) -> str:
    return " ".join((exercise.__doc__ or "").split())


def main(arguments: list[str]) -> int:
    known = exercises()
    if not arguments:
        print("\n".join(f"{number}  {question(exercise)}" for number, exercise in known.items()))
        return 0
    if arguments[0] not in known:
        return bad(
            f"the exercise must be one of {', '.join(known)}, got {arguments[0]}; give its number and your answer"
        )
    exercise = known[arguments[0]]
    if len(arguments) == 1:
        print(question(exercise))
        return 0
    try:
        lesson = exercise(" ".join(arguments[1:]))
    except NotYet as hint:
        print(f"not yet: {hint}")
        return 1
    except BadAnswer as problem:
        return bad(str(problem))
    print(f"right: {lesson}")
    return 0


def bad(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
