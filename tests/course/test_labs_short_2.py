"""Labs 04, 05 and 07 in seconds: what starts a launcher of its own, or more than two processes, is for the complete labs."""

from __future__ import annotations

from pathlib import Path

import pages
from course import folder_of_a_learner, run_short
from test_labs_short import SHORTER, answers


def test_lab_04(tmp_path: Path) -> None:
    left_out = (
        "killed",
        "course[01]",
        "output_dir=runs/course/(machines|networks|job|rewound)",
        "spike_step",
        r"slurm\.py",
        r"04\.2",
        "machines runs",
    )
    changes = SHORTER | {
        "checkpoint.every=20": "checkpoint.every=2",
        "step-00000040": "step-00000002",
    }
    printed = run_short(pages.COURSE / "04_advanced.md", folder_of_a_learner(tmp_path), changes, left_out)
    assert answers(printed) == ["right"]
    batches = [
        text.split("global batch  ")[1].splitlines()[0]
        for name, text in printed.items()
        if "=2 output_dir=runs/course/accumulated" in name
    ]
    assert batches == ["16 = 2 micro x 2 processes x 4 accumulation"]
    (elsewhere,) = [
        text.splitlines()[1:]
        for name, text in printed.items()
        if "compare.py runs/course/whole runs/course/on-one" in name
    ]
    assert all(float(line.split()[-1]) < 1e-5 for line in elsewhere)


def test_lab_05(tmp_path: Path) -> None:
    left_out = ("--measure", "acc-lm parity", "hsdp")
    changes = {"(deep.yaml --dry-run)": r"\1 model.config.num_hidden_layers=2"}
    printed = run_short(pages.COURSE / "05_fsdp_and_zero.md", folder_of_a_learner(tmp_path), changes, left_out)
    assert answers(printed) == ["right"] * 2
    (plan,) = [text for name, text in printed.items() if name.startswith("acc-lm plan")]
    assert "take fsdp2:" in plan


def test_lab_07(tmp_path: Path) -> None:
    left_out = ("sp_size 4", "4xH100", "sequence_parallel.yaml", r"07\.2")
    changes = SHORTER | {" runs/course/long-4": ""}
    printed = run_short(pages.COURSE / "07_long_context.md", folder_of_a_learner(tmp_path), changes, left_out)
    assert answers(printed) == ["right"] * 2
    (parts,) = [text.splitlines()[1:] for name, text in printed.items() if "compare.py" in name]
    assert all(float(line.split()[-1]) < 1e-5 for line in parts)
    (losses,) = [text.split()[1::2] for name, text in printed.items() if name.startswith("grep")]
    assert len({f"{float(loss):.5f}" for loss in losses}) == 1, "conversations see each other"
