"""`acc-lm doctor`: what this machine is, and whether a config can run on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import ROOT

from acc_lm.cli import main
from acc_lm.runtime import doctor

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACC_LM_CONFIG_FILE", "")


def test_it_says_what_is_here_for_people_and_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Some builds of torch name their CUDA to Python and not to pip.
    assert torch.__version__.startswith(found["libraries"]["torch"])
    assert found["process_groups"]["gloo"] is True
    assert found["cuda"]["available"] == torch.cuda.is_available()
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("python", "libraries", "cuda", "devices", "connects", "precision", "C++"):
        assert f"\n{name} " in f"\n{text}"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_config_of_ours_can_be_rehearsed_here(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "has_libaio", lambda: True)
    assert main(["doctor", "--config_file", str(file)]) == 0
    assert "it can run here" in capsys.readouterr().out


REFUSED = {
    "a silent single process": ("distributed_type: MULTI_CPU\nnum_processes: 2\n", [], "which starts one"),
    "fp16 on a CPU": ("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp16\n", [], "must be bf16 or no on a CPU, got fp16"),
    "a misspelt key": ("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_ofload_params: true\n", [], "did you mean fsdp_offload_params?"),
    "uneven machines": ("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 3\n", [], "must be a multiple of num_machines 2"),
    "no libaio": ("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n  offload_param_device: nvme\n", [], "must find libaio"),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are the answers of a machine without a GPU")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_here_is_exit_code_4_and_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, options, says = REFUSED[name]
    monkeypatch.setattr(doctor, "has_libaio", lambda: False)
    file = tmp_path / "config.yaml"
    file.write_text(f"compute_environment: LOCAL_MACHINE\n{text}")
    assert main(["doctor", "--config_file", str(file), *options]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_more_processes_than_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = [{"name": "GPU", "memory_gb": 80.0, "capability": "9.0"}]
    monkeypatch.setattr(doctor, "_devices", lambda: one)
    arguments = ["doctor", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml"), "--num_processes", "4"]
    assert main(arguments) == 4
    assert "num_processes must be at most 1, one for each GPU, got 4; use --num_processes 1" in capsys.readouterr().err
