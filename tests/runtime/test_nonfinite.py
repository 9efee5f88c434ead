"""Divergence: a step whose gradient is not a number changes nothing on any process, and reports its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import Finished, Launch

from acc_lm.run_files.metrics_file import read


def train_with_bad_losses(
    arguments: list[str], bad_steps: tuple[int, ...], num_processes: int, value: float
) -> Finished:
    """Multiply the last process's loss by `value` in some steps."""

    def run() -> int:
        import acc_lm.training
        import train

        original = acc_lm.training.train_step

        def train_step(accelerator: Any, *positional: Any, step: int, **keywords: Any) -> Any:
            backward = accelerator.backward
            if step in bad_steps and accelerator.process_index == num_processes - 1:
                accelerator.backward = lambda loss: backward(loss * value)
            result = original(accelerator, *positional, step=step, **keywords)
            accelerator.backward = backward
            return replace(result, nll=result.nll * value) if step in bad_steps else result

        acc_lm.training.train_step = train_step  # type: ignore[assignment]
        return train.main(arguments)

    return Launch(run, num_processes).wait(60)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_single_bad_step_is_skipped_counted_and_dumped(
    value: float, num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    from acc_lm.rows.order import RowOrder

    run = tmp_path / "run"
    finished = train_with_bad_losses(tiny, (3,), num_processes, value)
    assert finished.codes == [0] * num_processes, finished.outputs
    assert finished.output.count("step 3 was skipped: the gradient of ") == 1
    dumped = json.loads((run / "nonfinite_step_3.json").read_text())
    num_rows = int(finished.output.split("rows ")[1].split()[0].replace(",", ""))
    assert dumped["rows"] == RowOrder(7, num_rows, 12).rows_at(3).tolist()
    assert dumped["parameters"]
    by_step = {entry["step"]: entry for entry in read(run) if "train/skipped_steps" in entry}
    assert [by_step[step]["train/skipped_steps"] for step in (1, 2, 4, 6)] == [0, 0, 1, 1]
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    state = json.loads((run / "checkpoints/step-00000006/state.json").read_text())
    assert state["num_updates"] == 5, "the bias correction counts updates and not steps"


def test_a_resumed_run_continues_the_counts(tiny: list[str], tmp_path: Path) -> None:
    """Skipped steps in total, and consecutive ones: two before the interruption and one after it are three."""
    longer = ["training.max_steps=8", "training.log_every=1"]
    assert train_with_bad_losses(tiny, (3, 5, 6), 1, float("nan")).codes == [0]
    finished = train_with_bad_losses([*tiny, *longer], (7,), 1, float("nan"))
    assert finished.codes == [6], finished.output
    assert "got 3 of 3 tolerated non-finite steps in a row, in step 7" in finished.errors[0]
    assert train_with_bad_losses([*tiny, *longer], (8,), 1, float("nan")).codes == [0]
    counts = {
        entry["step"]: entry["train/skipped_steps"] for entry in read(tmp_path / "run") if "train/tokens" in entry
    }
    assert (counts[6], counts[7], counts[8]) == (3, 3, 4)


def test_a_device_whose_fused_optimizer_ignores_found_inf_skips_bad_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPS, whose kernel takes `found_inf` and ignores it."""
    from acc_lm.runtime.engines import gradients

    class Deaf(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            self.found_inf = torch.zeros(())
            super().step()

    monkeypatch.setattr(gradients, "HEEDS_FOUND_INF", ("cuda",))
    model = torch.nn.Linear(3, 1)
    optimizer = Deaf(model.parameters(), lr=0.1, fused=True)
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), scaler=None, unscale_gradients=lambda: None)
    watched = gradients.Gradients(accelerator, model)
    for value, changes in ((1.0, True), (float("nan"), False), (1.0, True)):
        before = model.weight.detach().clone()
        (model(torch.ones(1, 3)).sum() * value).backward()
        watched.clip(1.0, optimizer)
        optimizer.step()
        watched.drop()
        assert bool((model.weight != before).any()) == changes
        assert bool(model.weight.isfinite().all())
    assert [bool(names) for names in watched.not_finite()] == [False, True, False]


def test_too_many_bad_steps_in_a_row_end_the_run_and_the_newest_checkpoint_is_good(
    tiny: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finished = train_with_bad_losses([*tiny, "training.log_every=1"], (3, 4, 5, 6), 2, float("nan"))
    assert finished.codes == [6, 6], finished.outputs
    (line,) = finished.errors
    assert "got 3 of 3 tolerated non-finite steps in a row, in step 5 first in" in line
    assert json.loads((run / "summary.json").read_text())["status"] == "diverged"
    assert sorted(path.name for path in run.glob("nonfinite*")) == [f"nonfinite_step_{step}.json" for step in (3, 4, 5)]
    from safetensors.torch import load_file

    for file in run.glob("checkpoints/step-*/tensors-*"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def test_two_bad_steps_with_a_good_one_between_them_do_not_end_it(tiny: list[str], tmp_path: Path) -> None:
    finished = train_with_bad_losses([*tiny, "training.max_nonfinite_steps=2"], (2, 4, 6), 1, float("nan"))
    assert finished.codes == [0], finished.output
    assert finished.output.count("was skipped") == 3
    # Steps that are logged and saved too: their loss is not a number, and stays out of the record.
    entries = {entry["step"]: entry for entry in read(tmp_path / "run") if "train/tokens" in entry}
    assert ["train/loss" in entries[step] for step in (1, 2, 4, 6)] == [True, False, False, False]


def test_a_loss_that_is_not_a_number_under_a_finite_gradient_ends_the_run(tiny: list[str], tmp_path: Path) -> None:
    def run() -> int:
        import acc_lm.training
        import train

        original = acc_lm.training.train_step

        def train_step(*positional: Any, step: int, **keywords: Any) -> Any:
            result = original(*positional, step=step, **keywords)
            return replace(result, nll=result.nll * float("nan")) if step == 4 else result

        acc_lm.training.train_step = train_step
        return train.main(tiny)

    finished = Launch(run).wait()
    assert finished.codes == [6], finished.output
    assert "the loss must stay finite, got nan under a finite gradient" in finished.errors[0]


def test_a_batch_without_any_target_is_not_divergence(tiny: list[str], tmp_path: Path) -> None:
    def run() -> int:
        import acc_lm.rows.text_rows
        import train

        original = acc_lm.rows.text_rows.Rows.__getitems__
        count = acc_lm.rows.text_rows.Rows.count_targets

        def getitems(self: Any, rows: Any) -> Any:
            batch = original(self, rows)
            if not torch.is_grad_enabled():
                return batch
            batch["targets"][np.isin(np.asarray(rows), empty)] = -100
            return batch

        from acc_lm.rows.order import RowOrder

        empty = RowOrder(7, 385, 12).rows_at(4)
        acc_lm.rows.text_rows.Rows.__getitems__ = getitems  # type: ignore[method-assign]
        acc_lm.rows.text_rows.Rows.count_targets = lambda self, rows: (
            0 if set(rows) == set(empty) else count(self, rows)
        )  # type: ignore[method-assign]
        return train.main([*tiny, "training.log_every=1"])

    finished = Launch(run).wait()
    assert finished.codes == [0], finished.output
    assert "385 of 32 tokens" in finished.output
    losses = {entry["step"]: entry["train/loss"] for entry in read(tmp_path / "run") if "train/loss" in entry}
    assert losses[4] == 0.0
    assert "skipped:" not in finished.output


@pytest.mark.parametrize(("kinds", "num_skipped", "lines", "ends"), [
    (["", "loss", "", "", ""], 1, 1, ""), (["gradient"] * 4, 4, 0, ""), (["loss", "gradient", "loss", "", "loss", "loss"], 5, 4, ""),
    (["", "loss", "loss", "loss"], 3, 3, "got 3 of 3 tolerated non-finite steps in a row"),
    (["gradient"] * 7, 7, 3, "got 3 of 3 tolerated non-finite steps in a row"),
], ids=["a loss", "gradients", "not in a row", "losses in a row", "no scale is left"])  # fmt: skip
def test_fp16_skips_and_counts_and_ends_only_by_losses_or_without_a_scale(
    kinds: list[str], num_skipped: int, lines: int, ends: str, tmp_path: Path
) -> None:
    """With the scaler itself, which begins at 2^4 here: five overflows leave a scale below 1."""
    from types import SimpleNamespace

    from acc_lm.config import TrainingConfig
    from acc_lm.errors import DivergedError
    from acc_lm.rows.order import RowOrder
    from acc_lm.runtime import Gradients
    from acc_lm.training.divergence import Watch
    from acc_lm.training.step import StepResult

    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"), mixed_precision="fp16", scaler=scaler, is_main_process=True,
        reduce=lambda tensor, reduction: tensor, unscale_gradients=lambda: scaler.unscale_(optimizer),
    )  # fmt: skip
    gradients = Gradients(accelerator, model)
    config = TrainingConfig(max_steps=10, global_batch_size=2, micro_batch_size=2)
    watch = Watch(accelerator, gradients, config, RowOrder(0, 20, 2), tmp_path)
    reason = ""
    for step, kind in enumerate(kinds, start=1):
        loss = model(torch.ones(1, 2)).sum()
        scaler.scale(loss * (float("inf") if kind else 1.0)).backward()
        gradients.clip(1.0, optimizer)
        before = model.weight.clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.weight) == bool(kind)
        watch.note(step, StepResult(loss.detach() * (float("nan") if kind == "loss" else 1.0), torch.ones(()), 1))
        try:
            watch.look(step)
        except DivergedError as error:
            reason = str(error)
            assert step == len(kinds)
    assert (watch.num_skipped, len(watch.news())) == (num_skipped, lines)
    assert ends in reason
    assert bool(ends) == bool(reason)
