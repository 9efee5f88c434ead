"""kill -9 at every stage of saving and of making room: earlier checkpoints are intact, and the run ends as if uninterrupted."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from processes import run_training, start_training
from test_resume import assert_equal_runs
from test_stop import train_with, wrap

POINTS = {
    "before_tmp": 3, "after_first_file": 3, "before_manifest": 3, "after_manifest_before_rename": 3, "after_rename_before_fsync": 3,
    "before_rotate": 4, "mid_rotate": 1, "after_rotate": 4,
}  # fmt: skip
STEPS = 6


@pytest.fixture(scope="module")
def whole(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Uninterrupted runs, by number of processes."""
    runs = {count: tmp_path_factory.mktemp("whole") / str(count) for count in (1, 2)}
    for count, run in runs.items():
        run_training([*arguments_of(tiny_recipe), f"output_dir={run}"], count)
    return runs


def arguments_of(recipe: Path) -> list[str]:
    return ["--config", str(recipe), "training.micro_batch_size=6", "checkpoint.every=1", "training.eval_every=2"]


def test_every_stage_of_the_code_is_tried() -> None:
    from acc_lm.checkpointing import rotation, writing

    text = Path(str(writing.__file__)).read_text() + Path(str(rotation.__file__)).read_text()
    assert text.count("crash_point(") == len(POINTS)
    assert all(f'crash_point("{point}")' in text for point in POINTS)


NOT_SLOW = {(2, False): ("after_first_file", "mid_rotate"), (2, True): ("before_manifest",)}
"""Stages that two processes reach in different ways; the others are slow."""


@pytest.mark.parametrize(
    ("num_processes", "in_background", "point"),
    [
        pytest.param(*mode, point, marks=[] if point in NOT_SLOW.get(mode, POINTS) else [pytest.mark.slow])
        for point in POINTS
        for mode in [(1, False), (2, False), (2, True)]
    ],
)
def test_a_crash_at_a_stage_of_saving_loses_nothing(
    num_processes: int, in_background: bool, point: str, whole: dict[int, Path], tiny_recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [
        *arguments_of(tiny_recipe),
        f"output_dir={run}",
        f"checkpoint.asynchronous={str(in_background).lower()}",
    ]
    crashed = start_training(arguments, num_processes, {"ACC_LM_CRASH_AT": f"{point}@{POINTS[point]}"}).wait(60)
    assert -signal.SIGKILL in crashed.codes, crashed.outputs
    assert not (run / "final").exists()
    newest = max(folder for folder in (run / "checkpoints").glob("step-*") if (folder / "manifest.json").is_file())
    resumed = run_training(arguments, num_processes)
    assert f"resumed from {newest}" in resumed.output
    assert "was skipped" not in resumed.output, "what a crash leaves behind is no damaged checkpoint"
    assert_equal_runs(whole[num_processes], run, STEPS)
    assert not list((run / "checkpoints").glob("tmp-*"))
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"


PHASES = {
    "tokenising": ("acc_lm.text.writing.flush_file", 2),
    "building the model": ("acc_lm.training.run.build_model", 1),
    "the first step": ("acc_lm.training.train_step", 1),
    "an evaluation": ("acc_lm.evaluation.held_out.release_gathered", 2),
    "the picture": ("acc_lm.run_files.curves.draw_curves", 3),
    "the export": ("acc_lm.export.export.make_readable", 1),
    "the model card": ("acc_lm.export.export.model_card", 1),
}


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_in_any_other_phase_loses_nothing_either(
    phase: str, whole: dict[int, Path], tiny_recipe: Path, tmp_path: Path
) -> None:
    """Three times at the same place, then left alone: no partial cache and no partial model counts, the best is the best."""
    run = tmp_path / "run"
    arguments = [*arguments_of(tiny_recipe), f"output_dir={run}", f"data.cache_dir={tmp_path / 'cache'}"]
    for _ in range(3):
        finished = train_with(arguments, lambda: wrap(PHASES[phase][0], kill_self, PHASES[phase][1]))
        if finished.codes != [-signal.SIGKILL]:
            break  # it resumed after that place
        assert not (run / "final" / "README.md").exists(), finished.output
    else:
        finished = run_training(arguments)
    assert finished.code == 0, finished.output
    assert_equal_runs(whole[1], run, STEPS)
    best = [os.readlink(folder / "checkpoints/best") for folder in (whole[1], run)]
    assert best[0] == best[1]


def test_a_checkpoint_not_written_by_one_process_of_two_exists_on_none(
    whole: dict[int, Path], tiny_recipe: Path, tmp_path: Path
) -> None:
    """Process 1 dies before it writes its part of step 4, after process 0 has written its own."""
    run = tmp_path / "run"
    arguments = [*arguments_of(tiny_recipe), f"output_dir={run}"]

    def die() -> None:
        end = time.monotonic() + 20
        while not list((run / "checkpoints/tmp-step-00000004").glob("tensors-00000-*")):
            assert time.monotonic() < end
        kill_self()

    def prepare() -> None:
        if os.environ["RANK"] == "1":
            wrap("acc_lm.checkpointing.writing._write_mine", die, 4)

    assert train_with(arguments, prepare, 2).codes == [7, -signal.SIGKILL]
    assert not (run / "checkpoints/step-00000004").exists()
    resumed = run_training(arguments, 2)
    assert f"resumed from {run}/checkpoints/step-00000003 at step 3" in resumed.output
    assert_equal_runs(whole[2], run, STEPS)
