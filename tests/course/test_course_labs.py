"""Each lab in seconds, every command of its page for a few steps on at most two processes; and unchanged in `make test-all`."""

from __future__ import annotations

import re
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import exercises_05
import exercises_07
import pages
import pytest
from answers import BadAnswer, NotYet
from course import FEW_STEPS, folder_of_a_learner, run_short
from test_several_nodes import two_networks

OVERRIDES = " ".join(FEW_STEPS).replace("max_steps=3", "max_steps=4")
SHORTER = {r"^(([A-Z].* )?(python|torchrun|accelerate).* output_dir=runs/course/\S+.*)$": rf"\1 {OVERRIDES}"}


def answers(printed: dict[str, str]) -> list[str]:
    """First words of what the checks of the answers printed."""
    texts = [text for name, text in printed.items() if "check.py" in name]  # which may train first
    return [word for text in texts for word in re.findall(r"^(right|not yet|error): ", text, re.MULTILINE)]


def test_lab_01(tmp_path: Path) -> None:
    # Three processes and a port of the machine are for the complete lab.
    left_out = ("--num_processes 3", "http.server")
    printed = run_short(pages.COURSE / "01_setup.md", folder_of_a_learner(tmp_path), SHORTER, left_out)
    assert answers(printed) == ["right"] * 3
    assert "{'status': 'completed', 'exit_code': 0, 'world_size': 2, 'backend': 'gloo', 'step': 4}" in "".join(
        printed.values()
    )


def test_lab_02(tmp_path: Path) -> None:
    # These two start new interpreters, or need one that has not loaded bitsandbytes.
    changes = SHORTER | {" runs/course/spawn runs/course/notebook": ""}
    left_out = ("spawn.py", "notebook_launcher")
    printed = run_short(pages.COURSE / "02_train.md", folder_of_a_learner(tmp_path), changes, left_out)
    assert answers(printed) == ["right"] * 3
    (same, launchers, unsummed) = (text.splitlines()[1:] for name, text in printed.items() if "compare.py" in name)
    assert len(same) == 4
    assert all(float(line.split()[-1]) < 1e-6 for line in [*same, *launchers, unsummed[1]])


def test_lab_03(tmp_path: Path) -> None:
    # Compilation takes a minute; a run for each key is for the complete lab, which the table then lacks.
    left_out = (
        "dynamo",
        "bucket_cap_mb",
        "data.num_workers",
        "output_dir=runs/course/(base-again|accumulate|checkpointing|long)",
    )
    narrow = "model.config.hidden_size=32 model.config.intermediate_size=32 model.config.num_hidden_layers=1"
    changes = {pattern: f"{change} {narrow}" for pattern, change in SHORTER.items()} | {
        r"profile.steps=\[6,9\]": "profile.steps=[2,3]",
        r"table.py runs/course/base .*": "table.py runs/course/base runs/course/hook runs/course/bf16",
        "table.py runs/course/long .*": "table.py runs/course/base runs/course/base",
    }
    printed = run_short(pages.COURSE / "03_optimization.md", folder_of_a_learner(tmp_path), changes, left_out)
    assert answers(printed) == ["right"] * 3
    table = next(text for name, text in printed.items() if "table.py runs/course/base " in name)
    assert [line.split(" | ")[1] for line in table.splitlines()[2:]] == [
        "nothing", "distributed.comm_hook=fp16", "training.mixed_precision=bf16",
    ]  # fmt: skip


# Labs 04 to 07: what starts a launcher of its own, or more than two processes, is for the complete labs.


def test_lab_04(tmp_path: Path) -> None:
    left_out = (
        "killed",
        "course[01]",
        "runs/course/(networks|job)",
        "output_dir=runs/course/(machines|rewound)",
        "spike_step",
        r"slurm\.py",
        r"04\.2",
        "output_dir=runs/course/(rounded|recomputed)",
        "gradient_checkpointing=.* output_dir=runs/course/dry",
    )
    changes = SHORTER | {
        " runs/course/rounded runs/course/recomputed": "",
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
    changes = SHORTER | {" runs/course/long-4": "", "training.eval_batches=1": "training.eval_batches=null"}
    printed = run_short(pages.COURSE / "07_long_context.md", folder_of_a_learner(tmp_path), changes, left_out)
    assert answers(printed) == ["right"] * 2
    (parts,) = [text.splitlines()[1:] for name, text in printed.items() if "compare.py" in name]
    assert all(float(line.split()[-1]) < 1e-5 for line in parts)
    (losses,) = [text.split()[1::2] for name, text in printed.items() if name.startswith("grep")]
    assert len({f"{float(loss):.5f}" for loss in losses}) == 1, "conversations see each other"


@pytest.mark.parametrize(
    ("exercise", "wrong", "hint"),
    [
        (exercises_05.exercise_1, "162", "there are eight"),
        (exercises_05.exercise_1, "21.7", "2^30"),
        (exercises_05.exercise_2, "246", "one micro-batch"),
        (exercises_07.exercise_3, "8", "does not divide"),
        (exercises_07.exercise_3, "2", "fewer heads"),
    ],
)
def test_a_wrong_answer_gets_a_hint(exercise: Callable[[str], str], wrong: str, hint: str) -> None:
    with pytest.raises(NotYet, match=re.escape(hint)):
        exercise(wrong)
    with pytest.raises(BadAnswer):
        exercise("many")


def has_networks() -> bool:
    """True if two networks can be made here, as in a test of several nodes; a warning if not."""
    try:
        with two_networks():
            return True
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(f"no network namespaces ({error}): section 7 of lab 04 is left out", stacklevel=1)
        return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", pages.lab_pages("0[1-57]"), ids=lambda page: page.stem)
def test_the_complete_lab_from_a_clean_clone(page: Path, tmp_path: Path) -> None:
    """Typed word for word, except the installation."""
    pages.copy_project(tmp_path)
    environment = pages.learner_environment(tmp_path) | {"OMP_NUM_THREADS": "1"}  # tests run in parallel
    printed = {}
    commands = [
        command for command in pages.commands_of(page) if has_networks() or command.section != "7. Two networks"
    ]
    for done in pages.run_commands(commands, tmp_path, environment):
        assert done.code == done.command.code, f"{done.command.text}\n{done.output}"
        printed[done.command.text] = done.output
        print(f"{done.seconds:.0f} s, {done.cpu_seconds:.0f} s of CPU time  {done.command.text[:150]}")
    assert answers(printed) == ["right"] * 3
