"""Too little memory: a micro-batch that fits is found on all processes, or one line says what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import STRATEGY
from processes import ROOT, Finished, Launch, launcher_environment, run_training

from acc_lm.config import Config
from acc_lm.run_files.metrics_file import read

FIND = "training.find_micro_batch_size=true"


def train_with_little_memory(
    arguments: list[str], config: str, num_processes: int, most_rows: int, poor: int, from_call: int = 0
) -> Finished:
    """Limit the memory of one process (-1: of all) to a number of rows at once, from its n-th forward on."""

    def run() -> int:
        import train
        from acc_lm import runtime

        original, calls = runtime.prepare, iter(range(10**6))

        def prepare(*positional: Any) -> Any:
            model, optimizer = original(*positional)

            def before(module: Any, positional: Any, keywords: dict[str, torch.Tensor]) -> None:
                is_poor = poor in (-1, int(os.environ.get("RANK", "0")))
                if is_poor and next(calls) >= from_call and len(keywords["input_ids"]) > most_rows:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

            getattr(model, "module", model).register_forward_pre_hook(before, with_kwargs=True)
            return model, optimizer

        runtime.prepare = prepare
        return train.main(arguments)

    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    return Launch(run, num_processes, environment).wait(60)


@pytest.mark.parametrize(("config", "poor"), [("ddp", 1), ("ddp", 5)])
def test_a_micro_batch_that_fits_is_found_and_the_curve_stays(
    config: str, poor: int, tiny: list[str], tmp_path: Path
) -> None:
    """The process with little memory decides for both (none: nothing changes); losses are those of the size that was found."""
    found = 3 if poor < 2 else 6
    one, other = tmp_path / "found", tmp_path / "given"
    every = [*tiny, "training.log_every=1", "training.micro_batch_size=6"]
    finished = train_with_little_memory([*every, FIND, f"output_dir={one}"], config, 2, 3, poor)
    assert finished.codes == [0, 0], finished.outputs
    assert json.loads((one / "environment.json").read_text())["strategy"] == STRATEGY[config][0]
    sizes = [line for line in finished.output.splitlines() if "does not fit" in line]
    assert len(sizes) == (found == 3)
    assert f"12 = {found} micro x 2 processes x {6 // found} accumulation" in finished.output
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2)
    run_training([*every, f"training.micro_batch_size={found}", f"output_dir={other}"], 2, environment)
    losses = [[entry["train/loss"] for entry in read(run) if "train/loss" in entry] for run in (one, other)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_if_nothing_fits_the_line_says_what_else_to_do(tiny: list[str], tmp_path: Path) -> None:
    finished = train_with_little_memory([*tiny, FIND], "ddp", 2, 0, -1)
    assert finished.codes == [9, 9], finished.outputs
    (line,) = finished.errors
    assert "with training.micro_batch_size 1, got: CUDA out of memory. Tried to allocate 2.00 GiB." in line
    assert "model.gradient_checkpointing=true keeps fewer activations" in line


@pytest.mark.parametrize("poor", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_memory_that_runs_out_during_a_run_is_exit_code_9_and_one_line(
    poor: int, tiny: list[str], tmp_path: Path
) -> None:
    """In step 5; the same command with the suggested change resumes from the checkpoint of step 4 and completes."""
    run, arguments = tmp_path / "run", [*tiny, "training.micro_batch_size=6", "training.eval_every=null"]
    finished = train_with_little_memory(arguments, "ddp", 2, 3, poor, from_call=5)
    assert finished.codes[poor] == 9, finished.outputs
    assert finished.codes[1 - poor] == 7, finished.outputs
    (line,) = [line for line in finished.outputs[poor].splitlines() if "memory must" in line]
    assert (
        "training.micro_batch_size=3 splits the same batches into smaller parts, model.gradient_checkpointing=true"
        in line
    )
    if poor == 0:
        assert json.loads((run / "summary.json").read_text())["status"] == "out_of_memory"
    again = train_with_little_memory([*arguments, "training.micro_batch_size=3"], "ddp", 2, 3, poor)
    assert again.codes == [0, 0], again.outputs
    assert "resumed from" in again.output


def test_the_ladder_goes_from_cheap_to_expensive() -> None:
    """Each rung taken, the next one is named."""
    from acc_lm.runtime.monitoring.memory import next_rung

    said = []
    for micro, checkpointing, sharded, precision in (
        (6, False, False, "no"), (1, False, False, "no"), (1, True, False, "no"), (1, True, True, "no"), (1, True, True, "bf16"),
    ):  # fmt: skip
        recipe = Config.model_validate({
            "model": {"config": {"model_type": "gpt2"}, "gradient_checkpointing": checkpointing},
            "training": {"max_steps": 9, "global_batch_size": 12, "micro_batch_size": micro, "mixed_precision": precision},
            "schedule": {"warmup_steps": 0},
        })  # fmt: skip
        before = dict(os.environ)
        if sharded:
            os.environ |= launcher_environment(ROOT / "accelerate_configs/fsdp2.yaml", 2)
        said.append(next_rung(recipe))
        os.environ.clear()
        os.environ.update(before)
    words = ("training.micro_batch_size=3", "gradient_checkpointing=true", "fsdp2.yaml", "bf16", "fsdp2_offload.yaml")
    assert [word for word, line in zip(words, said, strict=True) if word not in line] == []


def test_cuda_is_initialised_before_its_memory_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD nothing else uses the device before the model exists, and its counters fail then."""
    from acc_lm.runtime import Memory

    asked: list[str] = []
    for name in ("init", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: asked.append(name) or 0)
    Memory(torch.device("cuda")).note("model built")
    assert asked == ["init", "max_memory_allocated", "reset_peak_memory_stats"]
