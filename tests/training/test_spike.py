"""Loss spikes: reported, or undone; the same steps whatever interrupts the run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Finished, Launch
from test_nonfinite import train_with_bad_losses
from test_resume import assert_equal_runs, different, tensors_of

from acc_lm.checkpointing.format import checksum
from acc_lm.run_files.metrics_file import read
from acc_lm.run_files.names import MANIFEST, STATE

LONG = ["training.max_steps=30", "checkpoint.every=6", "checkpoint.keep_last=null", "training.log_every=5", "training.eval_every=null",
        "training.micro_batch_size=6"]  # fmt: skip
DISTURBED = 20
"""Step after which the weights are spoilt: the loss of the next one jumps; the checkpoint before is of step 18."""


def train_disturbed(arguments: list[str], num_processes: int = 1, times: int = 1, killed_after: int = 0) -> Finished:
    """Spoil the weights after a step, as a very bad batch would; each time that step is reached, or a given number of times."""

    def run() -> int:
        import acc_lm.training
        import train

        original = acc_lm.training.train_step
        left = [times]

        def train_step(accelerator: Any, model: Any, *positional: Any, step: int, **keywords: Any) -> Any:
            outcome = original(accelerator, model, *positional, step=step, **keywords)
            if step >= DISTURBED and left[0] and (step - DISTURBED) % 2 == 0:
                left[0] -= 1
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(-30.0)
            if step == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return outcome

        acc_lm.training.train_step = train_step  # type: ignore[assignment]
        return train.main(arguments)

    return Launch(run, num_processes).wait(60)


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_rewound_run_equals_one_that_left_those_steps_out(
    num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    """Bit for bit what skipping the steps between the checkpoint and the jump gives; so nothing of them is left."""
    run, oracle = tmp_path / "rewound", tmp_path / "skipped"
    finished = train_disturbed([*tiny, *LONG, "training.on_spike=rewind", f"output_dir={run}"], num_processes)
    assert finished.codes == [0] * num_processes, finished.outputs
    assert finished.output.count("warning: the loss spiked to") == 1
    assert "rewound to the weights of step 18; the updates of steps 19 to 21 are undone" in finished.output
    without = [*tiny, *LONG, "training.max_nonfinite_steps=9", f"output_dir={oracle}"]
    assert train_with_bad_losses(without, (19, 20, 21), num_processes, float("nan")).codes == [0] * num_processes
    assert different(tensors_of(run, 30), tensors_of(oracle, 30)) == []
    counts = [{e["step"]: e["train/skipped_steps"] for e in read(folder) if "train/tokens" in e} for folder in (run, oracle)]  # fmt: skip
    assert [count[25] for count in counts] == [count[30] for count in counts] == [3, 3]
    known = [json.loads((folder / f"checkpoints/step-00000030/{STATE}").read_text()) for folder in (run, oracle)]
    assert known[0]["recent_losses"] == known[1]["recent_losses"]
    assert len(known[0]["recent_losses"]) == 27, "of the steps that count"
    dumped = json.loads((run / "spike_step_21.json").read_text())
    assert len(dumped["rows"]) == 12
    assert dumped["loss"] > dumped["median_before"]


def test_killed_after_the_jump_the_run_comes_to_the_same_end(tiny: list[str], tmp_path: Path) -> None:
    """Once before the next checkpoint, so that everything happens again, and once after it."""
    options = [*tiny, *LONG, "training.on_spike=rewind"]
    whole = tmp_path / "whole"
    assert train_disturbed([*options, f"output_dir={whole}"]).codes == [0]
    for number, last in enumerate((22, 26)):
        run = tmp_path / str(number)
        assert train_disturbed([*options, f"output_dir={run}"], killed_after=last).codes == [-signal.SIGKILL]
        again = train_disturbed([*options, f"output_dir={run}"], times=1 if last == 22 else 0)
        assert again.codes == [0], again.output
        assert ("rewound" in again.output) == (last == 22)
        assert_equal_runs(whole, run, 30)


@pytest.mark.parametrize(("action", "code"), [("warn", 0), ("ignore", 0), ("stop", 6)])
def test_a_jump_is_reported_ignored_or_ends_the_run(action: str, code: int, tiny: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = train_disturbed([*tiny, *LONG, f"training.on_spike={action}", f"output_dir={run}"])
    assert finished.code == code, finished.output
    assert finished.output.count("warning: the loss spiked") == (action == "warn"), "once, not at every high loss"
    assert (run / "spike_step_21.json").exists() == (action != "ignore")
    newest = max(path.name for path in (run / "checkpoints").glob("step-*"))
    assert newest == ("step-00000018" if action == "stop" else "step-00000030")
    if action == "stop":
        assert "at step 21 (training.on_spike is stop)" in finished.errors[0]


def test_a_run_with_repeated_jumps_is_given_up(tiny: list[str], tmp_path: Path) -> None:
    finished = train_disturbed([*tiny, *LONG, "training.on_spike=rewind", f"output_dir={tmp_path / 'run'}"], times=99)
    assert finished.code == 6, finished.output
    assert "got a spike after each of 3 rewinds to step" in finished.errors[0]


def test_without_a_checkpoint_there_is_nothing_to_rewind_to(tiny: list[str], tmp_path: Path) -> None:
    arguments = [*tiny, *LONG, "checkpoint.every=null", "training.on_spike=rewind", f"output_dir={tmp_path / 'run'}"]
    finished = train_disturbed(arguments)
    assert finished.code == 6, finished.output
    assert "got a spike and nothing to rewind to; lower checkpoint.every" in finished.errors[0]


def test_an_ordinary_noisy_loss_is_no_jump() -> None:
    """A falling loss with the noise of small batches, over 3000 steps; a jump of 3 nats in it is a spike."""
    from acc_lm.config import TrainingConfig
    from acc_lm.training.divergence import Watch

    generator = torch.Generator().manual_seed(0)
    steps = torch.arange(1, 3001)
    noise = torch.randn(3000, generator=generator, dtype=torch.float64)
    losses = (3 + 6 / steps**0.5 + 0.3 * noise).tolist()

    class Alone:
        mixed_precision, is_main_process = "no", False

    def jumps(values: list[float]) -> list[str]:
        watch = Watch(Alone(), None, TrainingConfig(max_steps=1), None, Path())  # type: ignore[arg-type]
        for number, value in enumerate(values, start=1):
            watch._compare(number, value)
        return watch.news()

    assert jumps(losses) == []
    losses[2000] += 6
    assert len(jumps(losses)) == 1


def test_a_threshold_is_in_standard_deviations_of_the_losses_before() -> None:
    """Losses 3 - 0.2, 3 and 3 + 0.2 in turn: their median deviation is 0.2, a normal distribution's of 1.4826 * 0.2."""
    from acc_lm.config import TrainingConfig
    from acc_lm.training.divergence import Watch

    class Alone:
        mixed_precision, is_main_process = "no", False

    for jump, num_reported in ((5.99, 0), (6.01, 1)):
        config = TrainingConfig(max_steps=1, spike_threshold=6.0)
        before = {"recent_losses": [2.8, 3.0, 3.2] * 20}
        watch = Watch(Alone(), None, config, None, Path(), before=before)  # type: ignore[arg-type]
        watch._compare(61, 3.0 + jump * 1.4826 * 0.2)
        assert len(watch.news()) == num_reported


def test_a_checkpoint_without_losses_can_be_resumed_and_rewound_to(tiny: list[str], tmp_path: Path) -> None:
    """Written before checkpoints contained losses: after a rewind to it, losses are compared with those since then."""
    options = [*tiny, *LONG, "training.on_spike=rewind", "checkpoint.every=null"]
    assert train_disturbed([*options, "training.max_steps=2"]).codes == [0]
    folder = tmp_path / "run/checkpoints/step-00000002"
    state, manifest = (json.loads((folder / name).read_text()) for name in (STATE, MANIFEST))
    assert len(state.pop("recent_losses")) == 2
    (folder / STATE).write_text(json.dumps(state))
    manifest["files"][STATE] = {"size": (folder / STATE).stat().st_size, "xxh3_128": checksum(folder / STATE)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    finished = train_disturbed(options)
    assert finished.codes == [0], finished.output
    assert "rewound to the weights of step 2; the updates of steps 3 to 21 are undone" in finished.output
