"""Each lab in seconds, every command of its page for a few steps on at most two processes; and unchanged in `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest
from course import FEW_STEPS, folder_of_a_learner, run_short

OVERRIDES = " ".join(FEW_STEPS).replace("max_steps=3", "max_steps=4")
SHORTER = {r"^(([A-Z].* )?(python|torchrun|accelerate).* output_dir=runs/course/\S+.*)$": rf"\1 {OVERRIDES}"}


def answers(printed: dict[str, str]) -> list[str]:
    """First words of what the checks of the answers printed."""
    return [text.partition(":")[0] for name, text in printed.items() if "check.py" in name]


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", pages.lab_pages("0[1-3]"), ids=lambda page: page.stem)
def test_the_complete_lab_from_a_clean_clone(page: Path, tmp_path: Path) -> None:
    """Typed word for word, except the installation."""
    pages.copy_project(tmp_path)
    environment = pages.learner_environment(tmp_path) | {"OMP_NUM_THREADS": "1"}  # tests run in parallel
    printed = {}
    for done in pages.run_commands(pages.commands_of(page), tmp_path, environment):
        assert done.code == done.command.code, f"{done.command.text}\n{done.output}"
        printed[done.command.text] = done.output
        print(f"{done.seconds:.0f} s, {done.cpu_seconds:.0f} s of CPU time  {done.command.text[:150]}")
    assert answers(printed) == ["right"] * 3
