"""Each lab in seconds: every command of its page for a few steps, on at most two processes."""

from __future__ import annotations

from pathlib import Path

import pages
from course import FEW_STEPS, folder_of_a_learner, run_short

OVERRIDES = " ".join(FEW_STEPS).replace("max_steps=3", "max_steps=4")
SHORTER = {r"^((python|torchrun|accelerate).* output_dir=runs/course/\S+)$": rf"\1 {OVERRIDES}"}


def answers(printed: dict[str, str]) -> list[str]:
    """First words of what the checks of the answers printed."""
    return [text.partition(":")[0] for name, text in printed.items() if "check.py" in name]


def test_lab_02(tmp_path: Path) -> None:
    # These two start new interpreters, or need one that has not loaded bitsandbytes.
    changes = SHORTER | {" runs/course/spawn runs/course/notebook": ""}
    left_out = ("spawn.py", "notebook_launcher")
    printed = run_short(pages.COURSE / "02_train.md", folder_of_a_learner(tmp_path), changes, left_out)
    assert answers(printed) == ["right"] * 3
