"""An Apple GPU that is not there: which device a launch gets, and what is refused. No test here has run on a Mac."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import launcher_environment, run_everywhere, run_training

from acc_lm.config.loading import load_config
from acc_lm.errors import MachineError
from acc_lm.runtime import has_accelerator
from acc_lm.runtime.launch import refusals

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"


@pytest.fixture
def apple_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a Mac with macOS 15, up to the first tensor on the device."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (15, 0))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({"WORLD_SIZE": "1", "RANK": "0"}, True),
        ({"WORLD_SIZE": "2"}, False),
        ({"ACCELERATE_USE_FSDP": "true"}, False),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, False),
        ({"ACCELERATE_USE_CPU": "true"}, False),
    ],
)
def test_only_a_process_alone_and_without_an_engine_is_on_the_gpu(
    variables: dict[str, str], expected: bool, apple_gpu: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        apple_gpu.setenv(name, value)
    assert has_accelerator() is expected
    apple_gpu.setattr(torch.backends.mps, "is_available", lambda: False)  # a GPU of another maker
    assert has_accelerator() is ("ACCELERATE_USE_CPU" not in variables)


def test_one_process_gets_the_gpu_in_each_precision(
    tiny_recipe: Path, tmp_path: Path, apple_gpu: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_recipe, [f"output_dir={tmp_path}"])

    def run() -> list[str]:
        from acc_lm.runtime import build_accelerator

        return [str(build_accelerator(config).device)]

    assert run_everywhere(run, 1) == [["mps"]]
    for precision in ("bf16", "fp16"):
        assert run_everywhere(run, environment={"ACCELERATE_MIXED_PRECISION": precision}) == [["mps"]]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_several_processes_train_on_the_cpu_as_without_the_gpu(
    name: str, tiny: list[str], tmp_path: Path, apple_gpu: pytest.MonkeyPatch
) -> None:
    environment = launcher_environment(CONFIGS / f"{name}.yaml", 2)
    finished = run_training([*tiny, "training.max_steps=4"], 2, environment)
    assert "rehearsal: the real engine on CPU processes" in finished.output
    written = json.loads((tmp_path / "run/environment.json").read_text())
    assert (written["strategy"], written["num_processes"]) == (name, 2)
    assert written["device"].startswith("cpu")
    apple_gpu.undo()
    run_training([*tiny, "training.max_steps=4", f"output_dir={tmp_path}/other"], 2, environment)
    ledgers = [json.loads((tmp_path / run / "summary.json").read_text())["ledger"] for run in ("run", "other")]
    losses = [json.loads((tmp_path / run / "summary.json").read_text())["eval_loss"] for run in ("run", "other")]
    assert ledgers[0] == ledgers[1]
    assert losses[0] == losses[1]


def test_what_the_gpu_cannot_do_is_refused_in_one_line(apple_gpu: pytest.MonkeyPatch) -> None:
    refuse = refusals.refuse_what_an_apple_gpu_cannot_do
    for dtype, precision in (("float32", "no"), ("float32", "bf16"), ("bfloat16", "fp16")):
        refuse(dtype, precision, True)
    with pytest.raises(MachineError, match=r"model\.dtype must be float32 or bfloat16 on an Apple GPU"):
        refuse("float64", "no", True)
    with pytest.raises(MachineError, match="must be bf16, fp16 or no on an Apple GPU, got fp8"):
        refuse("float32", "fp8", True)
    refuse("float64", "no", False)
    apple_gpu.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major < 14)
    with pytest.raises(MachineError, match="before macOS 14, got bf16"):
        refuse("float32", "bf16", True)
    apple_gpu.setattr(torch.backends.mps, "is_available", lambda: False)
    refuse("float64", "bf16", True)


def test_a_run_in_float64_on_the_gpu_ends_with_its_line(tiny: list[str], apple_gpu: pytest.MonkeyPatch) -> None:
    finished = run_training([*tiny, "model.dtype=float64"], expect=4)
    assert finished.errors == [
        "error: model.dtype must be float32 or bfloat16 on an Apple GPU, which has no float64, got float64; set it, or run on the CPU: "
        "ACCELERATE_USE_CPU=1"
    ]
