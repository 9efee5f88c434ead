"""`acc-lm doctor`: a description of this machine, and whether a config can run on it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import psutil
import pytest
import torch
from processes import ROOT, launcher_environment, run_training

from acc_lm.cli import main
from acc_lm.errors import MachineError
from acc_lm.runtime.launch import doctor
from acc_lm.runtime.settings import extensions
from acc_lm.runtime.settings.config_file import read_config

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ANSWERS = sorted((ROOT / "tests/support/accelerate_config_answers").glob("*.yaml"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACC_LM_CONFIG_FILE", "")


def test_it_describes_the_machine_for_people_and_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
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
    monkeypatch.setattr(extensions, "has_libaio", lambda: True)
    assert main(["doctor", "--config_file", str(file)]) == 0
    assert "it can run here" in capsys.readouterr().out


@pytest.mark.parametrize("file", ANSWERS, ids=lambda file: file.stem)
def test_what_the_questionnaire_writes_is_judged_as_train_judges_it(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "has_libaio", lambda: True)
    assert main(["doctor", "--config_file", str(file)]) == (4 if file.stem in REFUSED_ANSWERS else 0)
    assert REFUSED_ANSWERS.get(file.stem, "") in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("file", ANSWERS, ids=lambda file: file.stem)
def test_what_the_questionnaire_writes_ends_as_the_doctor_says(
    file: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a recipe, whose block class one of them names; each is trained by as many processes as it requests."""
    if not extensions.has_libaio() and "nvme" in file.stem:
        pytest.skip("no libaio here")
    arguments = [
        "--config",
        tiny[1],
        f"output_dir={tmp_path / 'run'}",
        "training.max_steps=2",
        "schedule.warmup_steps=1",
    ]
    said = main(["doctor", "--config_file", str(file), *arguments])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    count = read_config(file).num_processes
    variables = {"MASTER_PORT": "1"} if file.stem == "multi_cpu" else {}  # the trace of a launch that started one
    finished = run_training(
        arguments, 1 if variables else count, launcher_environment(file, machine_rank=0) | variables, expect=None
    )  # fmt: skip
    assert set(finished.codes) == {said}, "\n".join(finished.outputs)
    assert finished.errors == lines


REFUSED_ANSWERS = {
    "fsdp1": "fsdp_version must be 2, got 1",
    "multi_cpu": "must start all requested processes, got one",
    "fsdp2_by_size": "fsdp_auto_wrap_policy must be TRANSFORMER_BASED_WRAP or NO_WRAP, got SIZE_BASED_WRAP",
    "ddp_fullgraph": "dynamo_use_fullgraph must be false under ddp",
}
MANY = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
FSDP = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n"
DEEPSPEED = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
# Without a recipe; tests/runtime/test_runtime.py compares the lines that need one with those of train.py.
REFUSED = {
    "a silent single process": ("distributed_type: MULTI_CPU\nnum_processes: 2\n", [], "got one (accelerate starts only one for MULTI_CPU"),
    "several without a strategy": ("distributed_type: 'NO'\nnum_processes: 2\n", [], "must start all requested processes, got one"),
    "fp16 on a CPU": (f"{MANY}mixed_precision: fp16\n", [], "mixed_precision of the launch must be bf16 or no on a CPU, got fp16"),
    "a misspelt key": (f"{FSDP}  fsdp_ofload_params: true\n", [], "did you mean fsdp_offload_params?"),
    "no processes": (MANY, ["--num_processes", "0"], "num_processes must be at least 1, got 0"),
    "uneven machines": ("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 3\n", [], "must be a multiple of num_machines 2"),
    "uneven by the command line": ("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 2\n", ["--num_processes", "5"], "must be a multiple of num_machines 2, got 5"),
    "fewer than machines": ("distributed_type: MULTI_GPU\nnum_machines: 4\nnum_processes: 4\n", ["--num_processes", "2"], "num_processes must be at least num_machines 4, got 2"),
    "a number in words": (f"{MANY}parallelism_config:\n  parallelism_config_sp_size: two\n", [], "must be one that Accelerate can launch"),
    "a library for fp8": (f"{MANY}mixed_precision: fp8\n", [], "must be one that Accelerate can launch, got: FP8 is not available"),
    "FSDP1": (f"{FSDP}  fsdp_version: 1\n", [], "fsdp_version must be 2, got 1"),
    "a second switch": (f"{FSDP}  fsdp_version: 2\n  fsdp_activation_checkpointing: true\n", [], "fsdp_activation_checkpointing must be false"),
    "a mesh that does not fit": (f"{FSDP}  fsdp_version: 2\nparallelism_config:\n  parallelism_config_dp_shard_size: 2\n", ["--num_processes", "3"], "got dp_replicate_size 1 x dp_shard_size 2 for 3 processes"),
    "tensor parallel": (f"{FSDP}  fsdp_version: 2\nparallelism_config:\n  parallelism_config_tp_size: 2\n", [], "parallelism_config_dp_shard_size must be at least 2 under FSDP2, got 1"),
    "ZeRO stage 0": (f"{DEEPSPEED}  zero_stage: 0\n", [], "must be 1, 2 or 3, got 0"),
    "no such JSON": (f"{DEEPSPEED}  deepspeed_config_file: nowhere.json\n", [], "deepspeed_config_file must exist, got 'nowhere.json'"),
    "a scheduler by hand": (f"{DEEPSPEED}  deepspeed_config_file: ds.json\n", [], "scheduler must be left out, got one"),
    "no libaio": (f"{DEEPSPEED}  zero_stage: 3\n  offload_param_device: nvme\n", [], "must find libaio"),
    "what Accelerate refuses": ("distributed_type: MULTI_GPU\n", [], "must be one that Accelerate can launch, got: You need to manually pass in `--num_processes`"),
    "Megatron-LM": ("distributed_type: MEGATRON_LM\nnum_processes: 2\nmegatron_lm_config: {megatron_lm_tp_degree: 1}\n", [], "got Megatron-LM"),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are the answers of a machine without a GPU")
@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_run_here_is_exit_code_4_and_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, options, says = REFUSED[name]
    monkeypatch.setattr(extensions, "has_libaio", lambda: False)
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: False)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 5, "scheduler": {}}')
    file, before = tmp_path / "config.yaml", dict(os.environ)
    file.write_text(f"compute_environment: LOCAL_MACHINE\n{text}")
    assert main(["doctor", "--config_file", str(file), *options]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert dict(os.environ) == before


def test_a_recipe_that_does_not_divide_is_exit_code_2(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml"), "--num_processes", "5"]
    assert main([*arguments, *tiny]) == 2
    assert "training.global_batch_size must be a multiple of" in capsys.readouterr().err
    assert main([*arguments[:3], *tiny]) == 0


def test_a_recipe_without_a_config_is_not_reported_as_checked(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *tiny]) == 2
    assert "--config and --num_processes must come with --config_file, got none" in capsys.readouterr().err


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(MachineError, match="processes than this machine has GPUs, got 4 for 1; use --num_processes 1"):
        doctor.check_config(ROOT / "accelerate_configs/ddp.yaml", 4)


def test_a_model_whose_state_exceeds_the_memory_is_refused(
    tiny_recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, gradients and two moments in float32: 16 bytes for each trained parameter, on each process of DDP."""
    arguments = ["--config", str(tiny_recipe), "model.config.vocab_size=257", "model.config.tie_word_embeddings=true"]
    sizes = "model.config={hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: %d, num_attention_heads: 32}"
    assert main(["doctor", "--config_file", "ddp", "--num_processes", "2", *arguments, sizes % 1]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    gigabytes, total = map(float, re.findall(r"([\d.]+) GB", line))
    layer = 4096 * 4096 * 2 + 4096 * 128 * 2 + 3 * 4096 * 14336
    assert gigabytes == pytest.approx(2 * 16 * layer / 1e9, rel=0.05)
    assert total == pytest.approx(psutil.virtual_memory().total / 1e9, abs=0.1)
    assert main(["doctor", "--config_file", "fsdp2", "--num_processes", "2", *arguments, sizes % 1]) == 0
    assert f"at least {gigabytes / 2:.1f} GB" in capsys.readouterr().out
    long = ["data.sequence_length=2048", "training.micro_batch_size=16", "training.global_batch_size=32"]
    assert main(["doctor", "--config_file", "ddp", "--num_processes", "2", *arguments, *long, sizes % 3]) == 4
    problem = capsys.readouterr().err
    assert re.search(r"the memory must hold [\d.]+ GiB of 2 process\(es\), by acc-lm plan, got [\d.]+ GiB", problem)
    assert "try training.micro_batch_size=8" in problem
    assert main(["doctor", "--config_file", "fsdp2", "--num_processes", "2", *arguments, sizes % 500]) == 4
    assert "error: this machine must have at least 1" in capsys.readouterr().err
