"""A launch against the memory of this machine's GPUs, which are made up here."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import ROOT

from acc_lm.cli.train import run_to_its_end
from acc_lm.config import Config
from acc_lm.errors import ConfigError, MachineError, OutOfMemoryError
from acc_lm.planning import here
from acc_lm.planning.hardware import GIB, GPUS, gpus_here
from acc_lm.planning.here import memory_here, warn_of_memory
from acc_lm.planning.plan import Machine
from acc_lm.planning.probe import Probe

MODEL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4000,
}  # fmt: skip


def config_of(**training: Any) -> Config:
    given = {"max_steps": 1, "mixed_precision": "bf16", "global_batch_size": 16, "micro_batch_size": 8} | training
    return Config.model_validate({"model": {"config": MODEL}, "data": {"sequence_length": 1024}, "training": given})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def there(name: str, gigabytes: float, count: int = 1) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        found = SimpleNamespace(name=name, total_memory=int(gigabytes * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: found)

    return there


def test_a_launch_fits_is_close_or_is_refused(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Probe(config_of(), 0)  # once, because it takes seconds
    monkeypatch.setattr(here, "Probe", lambda *_, **__: measured)
    file = ROOT / "accelerate_configs/single_gpu.yaml"
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), is_main_process=True)
    lines = []
    for size in (80.0, 0.0, 1.0):
        gpus("NVIDIA A10G", size or float(lines[0].split()[3]) - 0.05)  # just below the upper end
        try:
            lines.append(memory_here(config_of(), file, None) or "")
        except MachineError as refusal:
            lines.append(str(refusal))
        warn_of_memory(on_gpu, config_of())
    assert lines[0].startswith("plan: ")
    assert lines[0].endswith(" GiB of each GPU, of 80.0 GiB")
    assert lines[1].endswith("which may be too much")
    assert lines[2].endswith("got 1.0 GiB; try training.micro_batch_size=4")
    warnings = capsys.readouterr().err.strip().splitlines()
    assert ["may not fit" in warnings[0], "will not fit" in warnings[1], len(warnings)] == [True, True, 2]


def test_a_cpu_is_not_warned_of(gpus: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpus("NVIDIA A10G", 0.1)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    warn_of_memory(on_cpu, config_of())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "gigabytes", "known"),
    [
        *((gpu.device, gpu.memory_gib, gpu.name) for gpu in GPUS.values()),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-80"),
        ("NVIDIA H100 NVL", 93.1, "H100"),
        ("NVIDIA L40", 44.5, None),
        ("NVIDIA GeForce RTX 4060", 7.6, None),
        ("NVIDIA GeForce RTX 3060 Ti", 7.8, None),
        ("NVIDIA GeForce RTX 3090 Ti", 23.6, None),
        ("AMD Instinct MI300X", 191.0, None),
    ],
)
def test_gpus_of_this_machine_are_known_by_name(name: str, gigabytes: float, known: str | None, gpus: Any) -> None:
    gpus(name, gigabytes, 4)
    if known is None:
        with pytest.raises(ConfigError, match=f"--gpus here must find one of .*, got {name}"):
            gpus_here()
        return
    count, gpu = gpus_here()
    assert (count, gpu.name, gpu.memory_gib) == (4, known, pytest.approx(gigabytes, abs=0.01))


def test_all_gpus_here_are_in_one_machine(gpus: Any) -> None:
    gpus("Tesla T4", 14.6, 8)
    count, gpu = gpus_here()
    assert (count, Machine(gpu, count).num_machines) == (8, 1), "others with T4s have 4"


def test_no_gpu_here_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--gpus here must find a GPU, got none on this machine"):
        gpus_here()


def test_a_model_that_scans_its_rows_is_not_measured_at_a_start(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus("NVIDIA A10G", 0.1)
    measured: list[int] = []
    monkeypatch.setattr(Probe, "_measure", lambda *_: measured.append(1))
    model = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 100}
    given = {"model": {"config": model}, "training": {"max_steps": 1}}
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), is_main_process=True)
    warn_of_memory(on_gpu, Config.model_validate(given))
    assert not measured


def test_an_error_of_memory_says_what_was_predicted_and_used(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(config_of().model_dump_json(include={"model", "data", "training"}))
    words = ["--config", str(file), f"output_dir={tmp_path}/run"]

    def train(config: Config, *_: Any) -> int:
        raise errors[0]

    low: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    errors = [low]
    assert run_to_its_end(train, words, file) == 9
    assert "predicted" not in capsys.readouterr().err  # no GPU
    gpus("NVIDIA A10G", 22.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 21 * GIB)
    for errors[0] in (low, OutOfMemoryError("the memory must hold a step, got: none; buy some")):
        assert run_to_its_end(train, words, file) == 9
        line, *problems = capsys.readouterr().err.strip().splitlines()
        found = re.fullmatch(
            r"memory: ([\d.]+) to ([\d.]+) GiB of each GPU predicted by acc-lm plan, 21.0 GiB of tensors used, 22.0 GiB there",
            line,
        )
        assert found, line
        assert 1 < float(found[1]) < float(found[2]) < 22, line
        assert problems[0].startswith("error: the memory must hold")
    monkeypatch.setattr(here, "memory_of", lambda *_: 1 / 0)
    errors[0] = ValueError("something else")
    assert run_to_its_end(train, words, file) == 1
