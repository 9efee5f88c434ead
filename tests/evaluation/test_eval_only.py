"""`train.py --eval-only`: the newest checkpoint or an existing model, one line in the record, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ROOT, launcher_environment, run_training

from acc_lm.run_files.metrics_file import read


def files_of(folder: Path) -> dict[str, bytes]:
    others = ("metrics.jsonl", "training_curves.png", "train.log")
    return {
        str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name not in others
    }


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [("single", 1), ("fsdp2", 2), ("deepspeed_zero3", 2), pytest.param("sequence_parallel", 4, marks=pytest.mark.slow)],
)
def test_the_newest_checkpoint_is_evaluated_and_nothing_else_changes(
    config: str, num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_training([*tiny, "training.eval_every=null"])
    before, record = files_of(run), read(run)
    environment = {}
    if num_processes > 1:
        environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    small = [*tiny, "training.eval_every=null", "training.micro_batch_size=6"]
    finished = run_training([*small, "--eval-only"], num_processes, environment)
    assert f"resumed from {run}/checkpoints/step-00000006 at step 6" in finished.output
    assert files_of(run) == before
    *old, new = read(run)
    assert old == record
    assert new["step"] == 6
    assert new["eval/loss"] == pytest.approx(record[-1]["eval/loss"], rel=1e-6)
    assert f"eval loss {new['eval/loss']:.4f}" in finished.output


def test_an_existing_model_is_evaluated_at_step_0(tiny: list[str], tmp_path: Path) -> None:
    run_training([*tiny, "training.eval_every=null"])
    expected = read(tmp_path / "run")[-1]["eval/loss"]
    model = ["model.config=null", f"model.name_or_path={tmp_path}/run/final"]
    other = tmp_path / "other"
    run_training([*tiny, *model, f"output_dir={other}", "--eval-only"])
    (entry,) = read(other)
    assert (entry["step"], entry["eval/loss"]) == (0, pytest.approx(expected, rel=1e-6))
    assert not (other / "final").exists()
    assert not (other / "checkpoints").exists()


def test_evaluation_ignores_how_a_model_was_trained_but_not_what_it_is(tiny: list[str], tmp_path: Path) -> None:
    run_training([*tiny, "training.eval_every=null"])
    expected = read(tmp_path / "run")[-1]["eval/loss"]
    others = [
        "training.max_steps=9",
        "training.global_batch_size=6",
        "training.micro_batch_size=6",
        "schedule.warmup_steps=1",
    ]
    finished = run_training([*tiny, *others, "optimizer.learning_rate=1e-2", "training.eval_every=null", "--eval-only"])
    assert "recipe changed" not in finished.output
    assert read(tmp_path / "run")[-1]["eval/loss"] == pytest.approx(expected, rel=1e-6)
    refused = run_training([*tiny, "data.eval_fraction=0.2", "--eval-only"], expect=5)
    assert "data.eval_fraction was 0.1, is 0.2" in refused.errors[0]
    assert f"choose the recipe of the run (--config {tmp_path}/run/config.yaml)" in refused.errors[1]
    run_training(["--config", str(tmp_path / "run/config.yaml"), "--eval-only"])


def test_with_nothing_to_evaluate_it_says_so(tiny: list[str], tmp_path: Path) -> None:
    finished = run_training([*tiny, "--eval-only"], expect=2)
    assert "--eval-only must have model.name_or_path or a checkpoint in" in finished.errors[0]
