"""Each lab in seconds: every command of its page for a few steps, on at most two processes."""

from __future__ import annotations

from pathlib import Path

import pages
from course import FEW_STEPS, folder_of_a_learner, run_short

OVERRIDES = " ".join(FEW_STEPS).replace("max_steps=3", "max_steps=4")


def test_lab_02(tmp_path: Path) -> None:
    changes = {
        r"^(.*markov\.yaml.* output_dir=\S+|torchrun .*|accelerate .*)$": rf"\1 {OVERRIDES}",
        r'\["--config", "docs': '["training.max_steps=4", "training.log_every=1", "--config", "docs',
    }
    printed = run_short(pages.COURSE / "02_train.md", folder_of_a_learner(tmp_path), changes, left_out=("spawn",))
    assert [text.count("right: ") for name, text in printed.items() if "check.py" in name] == [1, 1, 1]
