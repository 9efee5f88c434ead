"""fp16, executed: torch has a gradient scaler and autocast to float16 for a CPU too, and runs here get those in place of a GPU's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Finished, Launch, run_training
from safetensors.torch import load_file

from acc_lm.run_files.metrics_file import read

EACH_STEP = ["training.log_every=1", "training.max_steps=8", "checkpoint.every=4", "checkpoint.keep_last=20"]
USUAL = {"init_scale": 2.0**16, "growth_interval": 2000}
"""Torch's defaults."""


def train_in_fp16(
    arguments: list[str],
    num_processes: int = 1,
    scaler: dict[str, float] = USUAL,
    bad_losses: tuple[int, ...] = (),
    bad_gradients: tuple[int, ...] = (),
) -> Finished:
    """A run whose scaler is torch's, for the CPU; in the given steps, the last process's loss or a gradient of it is infinite."""

    def run() -> int:
        import accelerate

        import acc_lm.training
        import train
        from acc_lm.runtime.launch import refusals

        start, one_step = accelerate.Accelerator.__init__, acc_lm.training.train_step

        def init(self: Any, *positional: Any, **keywords: Any) -> None:
            start(self, *positional, **keywords)
            assert self.state.mixed_precision == "fp16"
            assert self.scaler is None, "Accelerate has one for a CPU: give it the arguments"
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", **scaler)  # type: ignore[arg-type]

        def train_step(accelerator: Any, model: Any, *positional: Any, step: int, **keywords: Any) -> Any:
            assert accelerator.num_processes == num_processes
            with accelerator.autocast():
                assert torch.get_autocast_dtype("cpu") == torch.float16
            handles = []
            if accelerator.process_index == num_processes - 1:
                if step in bad_losses:
                    handles.append(model.register_forward_hook(lambda *hooked: hooked[-1] * float("inf")))
                if step in bad_gradients:
                    handles.append(next(model.parameters()).register_hook(lambda gradient: gradient * float("inf")))
            result = one_step(accelerator, model, *positional, step=step, **keywords)
            for handle in handles:
                handle.remove()
            return result

        accelerate.Accelerator.__init__, acc_lm.training.train_step = init, train_step  # type: ignore[assignment]
        refusals.checked_precision = lambda *_, **__: "fp16"
        return train.main([*arguments, "training.mixed_precision=fp16"])

    return Launch(run, num_processes).wait(120)


def logged(run: Path, name: str) -> list[float]:
    return [entry[name] for entry in read(run) if name in entry]


def scaler_of(run: Path, step: int) -> dict[str, float]:
    return dict(json.loads((run / f"checkpoints/step-{step:08}/state.json").read_text())["loss_scaler"])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_losses_are_those_of_fp32_to_the_precision_of_fp16(num_processes: int, tiny: list[str], tmp_path: Path) -> None:
    finished = train_in_fp16([*tiny, *EACH_STEP], num_processes)
    assert finished.codes == [0] * num_processes, finished.outputs
    assert "float32 weights, float16 autocast compute" in finished.output
    run_training([*tiny, *EACH_STEP, f"output_dir={tmp_path / 'fp32'}"])
    half, single = (logged(tmp_path / name, "train/loss") for name in ("run", "fp32"))
    assert half == pytest.approx(single, rel=1e-3)
    assert half != single, "fp16 must show"
    assert logged(tmp_path / "run", "train/grad_norm") == pytest.approx(
        logged(tmp_path / "fp32", "train/grad_norm"), rel=1e-2
    )
    assert logged(tmp_path / "run", "train/skipped_steps") == [0] * 8


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_scale_that_is_too_large_is_silently_halved_until_it_fits(
    num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    scale = 2.0**40
    finished = train_in_fp16(
        [*tiny, *EACH_STEP, "training.max_steps=40"], num_processes, {"init_scale": scale, "growth_interval": 2000}
    )
    assert finished.codes == [0] * num_processes, finished.outputs
    assert "was skipped" not in finished.output
    assert not list(run.glob("nonfinite_step_*"))
    skipped = [int(count) for count in logged(run, "train/skipped_steps")]
    assert 5 < skipped[-1] < 30
    assert skipped[30] == skipped[-1], "at the start, where the scale is searched for"
    assert scaler_of(run, 40)["scale"] == scale / 2 ** skipped[-1]
    state = json.loads((run / "checkpoints/step-00000040/state.json").read_text())
    assert state["num_updates"] == 40 - skipped[-1]
    saved = load_file(run / f"checkpoints/step-00000040/tensors-00000-of-0000{num_processes}.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_scale_grows_and_a_resumed_run_has_it_bit_for_bit(
    num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    """Growth every three steps, with a checkpoint in between two."""
    grows = {"init_scale": 2.0**10, "growth_interval": 3}
    whole = [*tiny, *EACH_STEP, f"output_dir={tmp_path / 'whole'}"]
    assert train_in_fp16(whole, num_processes, grows).code == 0
    parts = [*tiny, *EACH_STEP, "training.max_steps=8"]
    from_start = train_in_fp16(
        [*parts, "training.max_steps=4", "checkpoint.allow_changed_recipe=true"], num_processes, grows
    )
    assert from_start.code == 0, from_start.output
    other = {"init_scale": 2.0**3, "growth_interval": 3}  # which the checkpoint's replaces
    finished = train_in_fp16([*parts, "checkpoint.allow_changed_recipe=true"], num_processes, other)
    assert finished.code == 0, finished.output
    for folder in ("whole", "run"):
        assert scaler_of(tmp_path / folder, 4) == scaler_of(tmp_path / folder, 4) | {
            "scale": 2.0**11,
            "_growth_tracker": 1,
        }
        assert scaler_of(tmp_path / folder, 8) == scaler_of(tmp_path / folder, 8) | {
            "scale": 2.0**12,
            "_growth_tracker": 2,
        }


@pytest.mark.parametrize("num_processes", [1, 2])
def test_losses_that_are_non_finite_are_counted_and_end_the_run(
    num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    """Unlike a gradient that overflowed because of the scale: an activation did."""
    run = tmp_path / "run"
    finished = train_in_fp16([*tiny, *EACH_STEP], num_processes, bad_losses=(3,))
    assert finished.codes == [0] * num_processes, finished.outputs
    assert finished.output.count("step 3 was skipped: the gradient of ") == 1
    assert (run / "nonfinite_step_3.json").exists()
    assert logged(run, "train/skipped_steps") == [0, 0, 1, 1, 1, 1, 1, 1]
    assert scaler_of(run, 4)["scale"] == USUAL["init_scale"] / 2
    again = [*tiny, *EACH_STEP, f"output_dir={tmp_path / 'again'}"]
    finished = train_in_fp16(again, num_processes, bad_losses=(3, 4, 5, 6))
    assert finished.codes == [6] * num_processes, finished.outputs
    assert "got 3 of 3 tolerated non-finite steps in a row, in step 5" in finished.errors[0]


def test_gradients_that_overflow_are_a_fault_once_the_scale_is_exhausted(tiny: list[str], tmp_path: Path) -> None:
    """Until then the search for the scale is silent. Below 1 there is nothing left to find."""
    bad = (3, 4, 5)
    finished = train_in_fp16([*tiny, *EACH_STEP], bad_gradients=bad)
    assert finished.code == 0, finished.output
    assert "was skipped" not in finished.output
    assert logged(tmp_path / "run", "train/skipped_steps") == [0, 0, 1, 2, 3, 3, 3, 3]
    small = [*tiny, *EACH_STEP, f"output_dir={tmp_path / 'small'}"]
    finished = train_in_fp16(small, scaler={"init_scale": 1.0}, bad_gradients=bad)
    assert finished.code == 6, finished.output
    assert "got 3 of 3 tolerated non-finite steps in a row" in finished.errors[0]
