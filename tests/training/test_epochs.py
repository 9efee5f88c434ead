"""A report for each pass over the training rows: what was trained on, to the last target, whatever interrupted it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backends import STRATEGY
from processes import ROOT, Finished, Launch, launcher_environment, run_training
from test_resume import assert_equal_logs, metrics_of
from test_stop import tell, train_with, wrap
from test_tracking import scalars_of

from acc_lm.reporting.console import Bar
from acc_lm.run_files.metrics_file import read

# Fewer rows than usual: a pass takes between 3 and 4 steps, so that some steps span two.
EPOCHS = ["training.max_steps=null", "training.num_epochs=3", "training.log_every=5", "data.sequence_length=320", "training.micro_batch_size=6",
          "training.eval_every=4", "training.eval_every_epochs=2", "checkpoint.every=2"]  # fmt: skip
COLUMNS = {"step", "epoch/number", "epoch/train_loss", "epoch/eval_loss", "epoch/learning_rate", "epoch/seconds"}


def reports(run: Path) -> dict[int, dict[str, float]]:
    found = [entry for entry in read(run) if "epoch/number" in entry]
    assert len(found) == len({entry["step"] for entry in found}), "each once"
    return {int(entry["epoch/number"]): entry for entry in found}


@pytest.fixture(scope="module")
def whole(
    tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Finished, list[tuple[float, int]]]:
    """The run, how it ended, and (summed loss, targets) of each of its steps, recomputed from what they returned."""
    run = tmp_path_factory.mktemp("epochs") / "whole"
    sums = run.with_name("sums.jsonl")

    def train() -> int:
        import acc_lm.training
        import train as program

        original = acc_lm.training.train_step

        def train_step(*positional: Any, **keywords: Any) -> Any:
            outcome = original(*positional, **keywords)
            with sums.open("a") as file:
                file.write(json.dumps([float(outcome.nll), outcome.num_targets]) + "\n")
            return outcome

        acc_lm.training.train_step = train_step  # type: ignore[assignment]
        options = ["--config", str(tiny_recipe), *EPOCHS, f"output_dir={run}", "tracking.report_to=[tensorboard]"]
        return program.main(options)

    finished = Launch(train).wait()
    assert finished.codes == [0], finished.output
    return run, finished, [tuple(json.loads(line)) for line in sums.read_text().splitlines()]


def test_a_pass_without_an_evaluation_reports_no_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar(10, 0, tmp_path, enabled=True)
    bar.show_epoch({"epoch/number": 2.0, "epoch/train_loss": 1.5, "epoch/learning_rate": 1e-3, "epoch/seconds": 12.0})
    bar.close()
    assert re.search(r"^epoch 2  train loss 1\.5000  lr 1\.00e-03  \S+", capsys.readouterr().out, re.M)


def test_each_pass_is_reported_exactly(whole: tuple[Path, Finished, list[tuple[float, int]]]) -> None:
    run, finished, sums = whole
    rows = int(finished.output.split("rows          ")[1].split(" ")[0])
    assert rows % 12, "some steps must span two passes"
    ends = [-(-rows * number // 12) for number in (1, 2, 3)]
    found = reports(run)
    assert [found[number]["step"] for number in (1, 2, 3)] == ends
    logged = {entry["step"]: entry for entry in read(run) if "train/loss" in entry}
    losses = {entry["step"]: entry["eval/loss"] for entry in read(run) if "eval/loss" in entry}
    assert {4, ends[1], ends[2]} <= set(losses), "by steps, by passes and at the end"
    first = 1
    for number, last in enumerate(ends, start=1):
        report = found[number]
        steps = sums[first - 1 : last]
        assert report["epoch/train_loss"] == sum(nll for nll, _ in steps) / sum(count for _, count in steps)
        evaluated = [step for step in losses if first <= step <= last]
        assert report.get("epoch/eval_loss") == (losses[max(evaluated)] if evaluated else None)
        first = last + 1
    assert set(found[3]) == COLUMNS
    assert found[3]["epoch/learning_rate"] == logged[ends[2]]["train/learning_rate"]
    reported = [line for line in finished.output.splitlines() if line.startswith("epoch ")]
    assert len(reported) == 3
    assert reported[2].startswith(
        f"epoch 3  train loss {found[3]['epoch/train_loss']:.4f}  eval loss {losses[ends[2]]:.4f}  lr "
    )
    table = json.loads((run / "summary.json").read_text())["epochs"]
    names = [name.removeprefix("epoch/") for name in sorted(COLUMNS)]
    assert [sorted(row) for row in table][2] == sorted(names)
    assert [row["train_loss"] for row in table] == [found[number]["epoch/train_loss"] for number in (1, 2, 3)]
    assert scalars_of(run)["epoch/train_loss"] == ends


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


MOMENTS: dict[str, tuple[Callable[[], None], str, int]] = {
    "killed in the middle of a pass": (kill, "acc_lm.training.train_step", 6),
    "killed right after a report": (kill, "acc_lm.training.reporter.Bar", 0),
    "stopped in the middle of a pass": (tell, "acc_lm.training.train_step", 5),
    "stopped where a pass ends": (tell, "acc_lm.training.train_step", 0),
}


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=[pytest.mark.slow] if "middle" in moment else []) for moment in MOMENTS]
)
def test_an_interruption_changes_no_report(
    moment: str, whole: tuple[Path, Finished, list[tuple[float, int]]], tiny_recipe: Path, tmp_path: Path
) -> None:
    run, (action, place, call) = tmp_path / "run", MOMENTS[moment]
    arguments = ["--config", str(tiny_recipe), *EPOCHS, f"output_dir={run}"]
    second = int(reports(whole[0])[2]["step"])

    def prepare() -> None:
        if moment == "killed right after a report":
            import acc_lm.reporting.console

            acc_lm.reporting.console.Bar.show_epoch = lambda bar, metrics: (
                kill() if metrics["epoch/number"] == 2 else None
            )  # type: ignore[method-assign]
        else:
            wrap(place, action, call or second)

    ended = train_with(arguments, prepare)
    assert ended.codes == [-signal.SIGKILL if action is kill else 75], ended.output
    if moment == "stopped where a pass ends":
        assert list(reports(run)) == [1], "an evaluation is due there too: both are left to the resumed run"
        # It reports both, and dies before it saves.
        assert train_with(arguments, lambda: wrap("acc_lm.training.run.MicroBatches", kill)).codes == [-signal.SIGKILL]
        assert list(reports(run)) == [1, 2]
    run_training(arguments)
    assert_equal_logs(whole[0], run)
    assert all(report["epoch/seconds"] > 0 for report in reports(run).values())


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2", "deepspeed_zero3")]
)
def test_reports_do_not_depend_on_the_engine(
    config: str, whole: tuple[Path, Finished, list[tuple[float, int]]], tiny_recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2)
    run_training(["--config", str(tiny_recipe), *EPOCHS, f"output_dir={run}"], 2, environment)
    assert json.loads((run / "environment.json").read_text())["strategy"] == STRATEGY[config][0]
    found, expected = metrics_of(run), metrics_of(whole[0])
    assert [sorted(entry) for entry in found] == [sorted(entry) for entry in expected]
    for mine, theirs in zip(found, expected, strict=True):
        if "epoch/number" in mine:
            assert mine == pytest.approx(theirs, rel=1e-5)


def test_an_older_checkpoint_begins_with_the_steps_after_it(tiny: list[str], tmp_path: Path) -> None:
    """It has none of the sums: the first report covers only the steps from there on, and claims no more."""
    from acc_lm.checkpointing.format import checksum

    arguments = [*tiny, *EPOCHS]
    run_training([*arguments, "training.num_epochs=1"])
    (folder,) = [path for path in (tmp_path / "run/checkpoints").glob("step-*2") if path.is_dir()]
    for other in (tmp_path / "run/checkpoints").glob("step-*"):
        if other != folder:
            other.rename(other.with_name(f"aside-{other.name}"))
    state = json.loads((folder / "state.json").read_text())
    for key in ("epoch", "early_stopping", "evaluation"):
        del state[key]
    for key in ("eval_every_epochs", "early_stopping_patience"):
        del state["recipe"]["training"][key]
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": (folder / "state.json").stat().st_size, "xxh3_128": checksum(folder / "state.json")}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    finished = run_training(arguments)
    assert f"resumed from {folder} at step 2" in finished.output
    assert sorted(reports(tmp_path / "run")) == [1, 2, 3]
