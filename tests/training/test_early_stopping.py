"""The best evaluation by any metric, and the end of a run that no longer improves; the same whatever interrupts it."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from backends import STRATEGY
from processes import ROOT, launcher_environment, run_training
from test_checkpoint import steps_of
from test_resume import assert_equal_runs
from test_stop import tell, train_with, wrap

from acc_lm.checkpointing.format import Checkpoint
from acc_lm.checkpointing.rotation import rotate
from acc_lm.config import CheckpointConfig, TrainingConfig
from acc_lm.config.loading import load_config
from acc_lm.errors import ConfigError
from acc_lm.run_files.metrics_file import read
from acc_lm.run_files.names import MANIFEST, STATE
from acc_lm.training.early_stopping import EarlyStopping

# The rate is so high that the loss falls to step 4 and has risen at step 6, far beyond any rounding.
WORSE = ["training.max_steps=24", "schedule.warmup_steps=12", "optimizer.learning_rate=1.0", "training.eval_every=2", "checkpoint.every=3",
         "training.micro_batch_size=6"]  # fmt: skip
STOPS = [*WORSE, "training.early_stopping_patience=2", "training.early_stopping_min_improvement=3"]
BEST, LAST = 4, 6


def stopping(values: list[float], metric: str = "eval/loss", patience: int = 2, least: float = 0.0) -> int | None:
    """The evaluation after which the run ends; with a checkpoint in the middle of every two."""
    config = TrainingConfig(max_steps=1, early_stopping_patience=patience, early_stopping_min_improvement=least)
    kept: dict[str, Any] = {}
    for number, value in enumerate(values, start=1):
        checkpoint = Checkpoint(Path(), json.loads(json.dumps(kept, allow_nan=False)))
        course = EarlyStopping(config, metric, checkpoint)
        course.count(number, {metric: value, "eval/other": 0.0})
        course.count(number, {metric: value})  # known from the record: counted once
        kept = course.state
        if course.reason:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "more", "expected"),
    [
        ([3.0, 2.0, 2.5, 2.4], {}, 4),
        ([3.0, 2.0, 2.5, 1.9, 2.0, 1.8], {}, None),
        ([3.0, 3.0, 3.0], {}, 3),
        ([3.0, 2.95, 2.9, 2.89], {"least": 0.2}, 3),
        ([3.0, 2.95, 2.7, 2.6, 2.55], {"least": 0.2}, 5),
        ([0.1, 0.3, 0.2, 0.3], {"metric": "eval/code/token_accuracy"}, 4),
        ([math.nan, math.nan], {}, 2),
        ([math.nan, 4.0, 3.0, math.inf, math.nan], {}, 5),
        ([3.0, 2.0, 2.5], {"patience": 1}, 3),
    ],
)
def test_evaluations_without_improvement_are_counted(
    values: list[float], more: dict[str, Any], expected: int | None
) -> None:
    assert stopping(values, **more) == expected


def test_an_older_checkpoint_or_another_metric_starts_the_count_there() -> None:
    config = TrainingConfig(max_steps=1, early_stopping_patience=1)
    other = {"early_stopping": {"metric": "eval/loss", "best": 1.0, "best_step": 2, "num_worse": 1, "step": 2}}
    assert EarlyStopping(config, "eval/loss", Checkpoint(Path(), other)).reason
    for state in ({}, other):
        course = EarlyStopping(config, "eval/perplexity", Checkpoint(Path(), state))
        assert course.reason is None
        course.count(3, {"eval/perplexity": 9.0})
        assert course.reason is None


@pytest.fixture(scope="module")
def whole(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("early") / "whole"
    finished = run_training(["--config", str(tiny_recipe), *STOPS, f"output_dir={run}"])
    assert "stopped early: 2 evaluations have not improved eval/loss by more than 3 on 5." in finished.output
    return run


def evaluations(run: Path) -> dict[int, float]:
    return {entry["step"]: entry["eval/loss"] for entry in read(run) if "eval/loss" in entry}


def weights(folder: Path) -> dict[str, bytes]:
    from acc_lm.checkpointing.loading import read_tensors

    return {key: tensor.numpy().tobytes() for key, tensor in read_tensors(folder) if key.startswith("param/")}


def exported(run: Path) -> dict[str, bytes]:
    from safetensors import safe_open

    with safe_open(run / "final/model.safetensors", "pt") as file:
        return {f"param/{key}": file.get_tensor(key).numpy().tobytes() for key in file.keys()}  # noqa: SIM118


def test_a_run_that_no_longer_improves_ends_with_its_best_weights(whole: Path) -> None:
    losses = evaluations(whole)
    assert sorted(losses) == [2, 4, 6]
    assert (min(losses, key=losses.__getitem__), max(losses)) == (BEST, LAST)
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["step"]) == ("completed", 0, LAST)
    assert summary["reason"].startswith("stopped early: 2 evaluations have not improved eval/loss by more than 3 on ")
    assert (summary["exported_step"], summary["best_evaluation"]["step"]) == (BEST, BEST)
    assert Path(summary["best_checkpoint"]).name == f"step-{BEST:08d}"
    assert steps_of(whole)[-1] == LAST, "needed by a resumed run"
    assert exported(whole) == weights(whole / f"checkpoints/step-{BEST:08d}")
    assert f"trained with acc-lm for {BEST} optimizer steps" in (whole / "final/README.md").read_text()
    assert f"| {losses[BEST]:.4f} |" in (whole / "final/README.md").read_text()


def test_the_same_command_again_changes_nothing_and_more_patience_resumes(
    whole: Path, tiny_recipe: Path, tmp_path: Path
) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    arguments = ["--config", str(tiny_recipe), *STOPS, f"output_dir={run}"]
    again = run_training(arguments)
    assert f"already complete: step {LAST} of 24" in again.output
    assert_equal_runs(whole, run, LAST)
    finished = run_training([*arguments, "training.early_stopping_patience=null"])
    assert f"resumed from {run}/checkpoints/step-{LAST:08d}" in finished.output
    assert max(evaluations(run)) == 24
    assert json.loads((run / "summary.json").read_text())["exported_step"] == 24, (
        "the last weights, without early stopping"
    )


@pytest.mark.parametrize(
    "moment", [pytest.param("counting", marks=pytest.mark.slow), "after the evaluation that ends it", "the export"]
)
def test_a_killed_run_comes_to_the_same_end(moment: str, whole: Path, tiny_recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--config", str(tiny_recipe), *STOPS, f"output_dir={run}"]
    place = {
        "counting": ("acc_lm.training.train_step", LAST),
        "after the evaluation that ends it": ("acc_lm.run_files.curves.draw_curves", 3),
        "the export": ("acc_lm.export.export.whole_weights", 1),
    }[moment]
    killed = train_with(arguments, lambda: wrap(place[0], lambda: os.kill(os.getpid(), signal.SIGKILL), place[1]))
    assert killed.codes == [-signal.SIGKILL]
    run_training(arguments)
    assert_equal_runs(whole, run, LAST)
    assert os.readlink(run / "checkpoints/best") == os.readlink(whole / "checkpoints/best")


@pytest.mark.parametrize("which", ["best", pytest.param("last", marks=pytest.mark.slow)])
def test_a_run_stopped_where_an_evaluation_is_due_counts_it_later(
    which: str, whole: Path, tiny_recipe: Path, tmp_path: Path
) -> None:
    """The checkpoint knows nothing of the evaluation that made it the best, or that ends the run; killed again after it was made up for."""
    step, run = LAST if which == "last" else BEST, tmp_path / "run"
    arguments = ["--config", str(tiny_recipe), *STOPS, f"output_dir={run}"]
    assert train_with(arguments, lambda: wrap("acc_lm.training.train_step", tell, step)).codes == [75]
    assert max(evaluations(run)) == step - 2
    again = train_with(
        arguments, lambda: wrap("acc_lm.training.run.MicroBatches", lambda: os.kill(os.getpid(), signal.SIGKILL))
    )
    assert again.codes == [-signal.SIGKILL]
    assert max(evaluations(run)) == step
    run_training(arguments)
    assert_equal_runs(whole, run, LAST)
    assert os.readlink(run / "checkpoints/best") == os.readlink(whole / "checkpoints/best")
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (whole, run)]
    assert len({(s["reason"], s["exported_step"], Path(s["best_checkpoint"]).name) for s in summaries}) == 1


@pytest.mark.parametrize(
    "config",
    ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "deepspeed_zero2", "deepspeed_zero3"))],
)
def test_all_processes_stop_together_and_export_the_best(
    config: str, whole: Path, tiny_recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2)
    finished = run_training(
        ["--config", str(tiny_recipe), *STOPS, "training.micro_batch_size=3", f"output_dir={run}"], 2, environment
    )
    assert json.loads((run / "environment.json").read_text())["strategy"] == STRATEGY[config][0]
    assert finished.output.count("stopped early: ") == 1
    found, expected = evaluations(run), evaluations(whole)
    assert found == pytest.approx(expected, rel=1e-2)  # at such a rate rounding grows fast
    assert exported(run) == weights(run / f"checkpoints/step-{BEST:08d}")


def test_the_best_is_the_best_by_the_chosen_metric(tiny: list[str], tmp_path: Path) -> None:
    """Checkpoints, links, list, picture's entry and summary follow; final/ gets these weights on request."""
    from acc_lm.cli.checkpoint import list_checkpoints

    run = tmp_path / "run"
    (tmp_path / "odd.txt").write_text("qxzj" * 40)  # which grows ever less likely
    metric = "eval/odd/perplexity"
    run_training(
        [*tiny, *WORSE, "training.max_steps=12", f"data.evaluation_sets={{odd: {tmp_path}/odd.txt}}", f"checkpoint.best_metric={metric}",
         "checkpoint.every=12", "export.weights=best"]
    )  # fmt: skip
    values = {entry["step"]: entry[metric] for entry in read(run) if metric in entry}
    best = min(values, key=values.__getitem__)
    losses = evaluations(run)
    assert best != min(losses, key=losses.__getitem__), "or this test shows nothing"
    assert os.readlink(run / "checkpoints/best") == f"step-{best:08d}"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_evaluation"] == {"metric": metric, "value": values[best], "step": best}
    assert summary["exported_step"] == best
    assert exported(run) == weights(run / f"checkpoints/step-{best:08d}")
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        list_checkpoints(run)
    assert metric in out.getvalue().splitlines()[0]
    (line,) = [line for line in out.getvalue().splitlines() if "the best" in line]
    assert line.startswith(f"step-{best:08d}")
    assert f" {values[best]:.4f} " in line


def test_rotation_follows_the_metric_and_reads_older_checkpoints(tmp_path: Path) -> None:
    accuracies = {1: 0.2, 2: 0.4, 3: 0.4, 4: None, 5: 0.1, 6: 0.1, 7: 0.1}
    root = tmp_path / "checkpoints"
    for step, value in accuracies.items():
        folder = root / f"step-{step:08d}"
        folder.mkdir(parents=True)
        evaluation = {"eval/loss": float(step), "eval/token_accuracy": value}
        state = {"eval_loss": 9.0 - step} if step == 1 else {"eval_loss": float(step), "evaluation": evaluation}
        (folder / STATE).write_text(json.dumps(state if value is not None else {"eval_loss": None, "evaluation": None}))
        (folder / MANIFEST).touch()
    # An evaluation that a stop left out is in the record alone.
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "eval/loss": 4.0, "eval/token_accuracy": 0.5}\n')
    rotate(root, CheckpointConfig(keep_last=2, keep_best=2, best_metric="eval/token_accuracy"))
    assert steps_of(tmp_path) == [2, 4, 6, 7], "of equal ones the first"
    assert os.readlink(root / "best") == "step-00000004"
    rotate(root, CheckpointConfig(keep_last=2, keep_best=1))
    assert steps_of(tmp_path) == [2, 6, 7]
    rotate(root, CheckpointConfig(keep_last=2, keep_best=1, best_metric="eval/gone/loss"))
    assert not (root / "best").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.best_metric=eval/los"], r"checkpoint\.best_metric must be a metric of the evaluation, got 'eval/los'; did you mean eval/loss\?"),
        (["checkpoint.best_metric=eval/code/loss"], r"checkpoint\.best_metric must be .*, got 'eval/code/loss'; did you mean eval/loss\?"),
        (["checkpoint.best_metric=eval/cod/token_accuracy", "data.evaluation_sets={code: x.py}"], r"did you mean eval/code/token_accuracy\?"),
        (["training.early_stopping_patience=2", "training.eval_every=null"], r"training\.early_stopping_patience must be null without evaluations during training, got 2"),
        (["training.early_stopping_patience=0"], r"training\.early_stopping_patience must be a number > 0, got 0"),
        (["training.early_stopping_patience=2", "checkpoint.keep_best=0"], r"checkpoint\.keep_best must be at least 1 when final/ gets the best weights, got 0"),
        (["export.weights=first"], r"export\.weights must be one of last, best, got 'first'"),
        (["training.metric_for_best_model=eval_loss"], r"metric_for_best_model is another tool's name, here it is checkpoint\.best_metric"),
    ],
)  # fmt: skip
def test_each_refusal_is_one_line(overrides: list[str], message: str, tiny_recipe: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(tiny_recipe, overrides)
    assert len(error.value.problems) == 1
