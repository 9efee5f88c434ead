"""Background saves: the same checkpoints, announced only once they exist, one at a time, and no error is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from backends import STRATEGY
from processes import ROOT, Launch, launcher_environment, run_training, start_training
from test_resume import assert_equal_runs, different, tensors_of
from test_stop import wrap

from acc_lm.checkpointing.format import problem_with
from acc_lm.run_files.metrics_file import read

IN_BACKGROUND = ["checkpoint.asynchronous=true", "checkpoint.every=1", "checkpoint.keep_last=null", "training.micro_batch_size=2"]  # fmt: skip
STEPS = 6
SAVED = re.compile(r"^saved (\S+): [\d.,]+ MB in [\d.]+ s$", re.MULTILINE)


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        ("ddp", 2),
        *(pytest.param(*other, marks=pytest.mark.slow)
          for other in [("single", 1), ("deepspeed_zero3", 2), ("fsdp2", 3), ("hsdp", 4), ("deepspeed_zero2", 2)]),
    ],
)  # fmt: skip
def test_a_background_save_writes_what_a_synchronous_save_writes(
    config: str, num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    """Every checkpoint, bit for bit, although training continues while it is written; then one is resumed."""
    environment = {}
    if config != "single":
        environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    common = [*tiny, *IN_BACKGROUND, "training.micro_batch_size=1"]
    synchronous, background = tmp_path / "synchronous", tmp_path / "background"
    run_training([*common, "checkpoint.asynchronous=false", f"output_dir={synchronous}"], num_processes, environment)
    finished = run_training([*common, f"output_dir={background}"], num_processes, environment)
    assert json.loads((background / "environment.json").read_text())["strategy"] == STRATEGY[config][0]
    for step in range(1, STEPS + 1):
        assert_equal_runs(synchronous, background, step)
    assert len(SAVED.findall(finished.output)) == STEPS
    (background / "checkpoints/step-00000006").rename(background / "moved")
    assert "resumed from" in run_training([*common, f"output_dir={background}"], num_processes, environment).output
    assert_equal_runs(synchronous, background, STEPS)


def test_training_continues_while_a_checkpoint_is_written(tiny: list[str], tmp_path: Path) -> None:
    """Nothing is written until two more steps are done: a synchronous save would wait forever, one without a copy would hold later weights."""
    synchronous, background = tmp_path / "synchronous", tmp_path / "background"
    arguments = [*tiny, "checkpoint.every=2", "training.log_every=1", "checkpoint.keep_last=null", "training.eval_every=null"]  # fmt: skip

    def function() -> int:
        import train
        from acc_lm.checkpointing import writing

        write = writing._write_mine

        def late(accelerator: Any, work: Path, snapshot: Any) -> Any:
            end = time.monotonic() + 20
            while work.name.endswith("2") and '"step": 4' not in (background / "metrics.jsonl").read_text():
                assert time.monotonic() < end, "the training waits"
                time.sleep(0.01)
            return write(accelerator, work, snapshot)

        writing._write_mine = late
        return train.main([*arguments, "checkpoint.asynchronous=true", f"output_dir={background}"])

    finished = Launch(function).wait()
    assert finished.code == 0, finished.output
    shown = [line for line in finished.output.splitlines() if re.match(r"(saved|step \d/)", line)]
    first = next(i for i, line in enumerate(shown) if "step-00000002" in line)
    assert any(line.startswith("step 4/") for line in shown[:first]), "said when it exists and not before"
    names = [Path(name).name for name in SAVED.findall(finished.output)]
    assert names == ["step-00000002", "step-00000004", "step-00000006"], "one after the other, each once"
    run_training([*arguments, f"output_dir={synchronous}"])
    assert different(tensors_of(synchronous, 2), tensors_of(background, 2)) == []


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_checkpoint_announced_as_saved_exists_after_a_kill(
    num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    """Killed at the moment the line appears."""
    run = tmp_path / "run"
    arguments = [*tiny, *IN_BACKGROUND, "training.max_steps=200", "training.eval_every=null", f"output_dir={run}"]
    launch = start_training(arguments, num_processes)
    end = time.monotonic() + 60
    while len(SAVED.findall(launch.outputs()[0])) < 3:
        assert time.monotonic() < end, launch.outputs()
    for pid in launch.pids:
        os.kill(pid, signal.SIGKILL)
    said = SAVED.findall(launch.wait().output)[-1]
    assert problem_with(Path(said)) is None


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_background_save_that_fails_ends_the_run_on_all_processes(
    victim: int, tiny: list[str], tmp_path: Path
) -> None:
    """Long before the next checkpoint is due, with the disk's error, on all of them."""
    run = tmp_path / "run"

    def function() -> int:
        import train

        def full() -> None:
            raise OSError(28, "No space left on device")

        if os.environ["RANK"] == str(victim):
            wrap("acc_lm.checkpointing.writing._write_mine", full, 2)
        return train.main([*tiny, *IN_BACKGROUND, "checkpoint.every=100", "training.max_steps=4000", "training.eval_every=null",
                           "checkpoint.keep_last=2", "training.log_every=1", f"output_dir={run}"])  # fmt: skip

    finished = Launch(function, 2).wait()
    assert finished.codes == [8, 8], finished.outputs
    (line,) = finished.errors
    assert "must have room for a checkpoint, got: No space left on device" in line
    assert [folder.name for folder in (run / "checkpoints").glob("*step-*")] == ["step-00000100"]
    assert json.loads((run / "summary.json").read_text())["status"] == "storage_error"
    assert read(run)[-1]["step"] < 290, "it was not noticed before the next save"


def test_a_stop_waits_for_the_checkpoint_that_it_requests(tiny: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*tiny, *IN_BACKGROUND, "training.max_steps=4000", "training.eval_every=null", "checkpoint.every=7", f"output_dir={run}"]  # fmt: skip
    launch = start_training(arguments, 2)
    end = time.monotonic() + 60
    while not SAVED.findall(launch.outputs()[0]):
        assert time.monotonic() < end, launch.outputs()
        time.sleep(0.01)
    os.kill(launch.pids[1], signal.SIGTERM)
    finished = launch.wait()
    assert finished.codes == [75, 75], finished.outputs
    summary = json.loads((run / "summary.json").read_text())
    assert (Path(summary["last_checkpoint"]) / "manifest.json").is_file()
    assert Path(summary["last_checkpoint"]).name == f"step-{summary['step']:08d}"


def test_slow_saves_are_reported(tiny: list[str], tmp_path: Path) -> None:
    """Compared with how long the launcher waits, and with the time between two saves."""

    def started(environment: dict[str, str]) -> str:
        def function() -> int:
            import train
            from acc_lm.checkpointing import saving

            saving.WORTH_SECONDS = 0.2
            wrap("acc_lm.checkpointing.writing._write_mine", lambda: time.sleep(0.3), 1)
            return train.main([*tiny, "checkpoint.every=2", f"output_dir={tmp_path / str(len(environment))}"])

        finished = Launch(function, 1, environment).wait()
        assert finished.code == 0, finished.output
        return finished.output

    hurried = started({"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "0.5"})
    assert (
        hurried.count("warning: a save takes 0 s, and the launcher ends its processes 0 s after a SIGTERM; set TORCH")
        == 1
    )
    assert started({}).count("raise checkpoint.every, or set checkpoint.asynchronous=true") == 1
