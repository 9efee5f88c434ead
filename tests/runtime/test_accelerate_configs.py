"""Every Accelerate config: Accelerate reads it, it says what it is for, and it holds no learning; none is ignored in part."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate_config_answers import record
from processes import ROOT, launcher_environment
from ruamel.yaml import YAML

from acc_lm.errors import MachineError
from acc_lm.runtime.settings import config_file
from acc_lm.runtime.settings.config_file import (
    check_config_file,
    known_keys,
    launch_with,
    lost_settings,
    resolved_deepspeed_config,
)

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ANSWERS = sorted((ROOT / "tests/support/accelerate_config_answers").glob("*.yaml"))
FULL = ROOT / "accelerate_configs" / "deepspeed_zero3_full.json"
PROCESSES = {
    "single_gpu": 1,
    "cpu": 1,
    "hsdp": 4,
    "multi_node_hsdp": 4,
    "sequence_parallel": 4,
    "fsdp2_tensor_parallel": 4,
    "multi_node_sequence_parallel": 4,
    "multi_node_fsdp2_tensor_parallel": 4,
}
SECTIONS = ["deepspeed_config", "dynamo_config", "fp8_config", "fsdp_config", "megatron_lm_config", "mpirun_config", "parallelism_config"]  # fmt: skip


def leaves(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(mapping, key) of every value that is not a mapping itself."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield values, key


def read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = YAML(typ="safe", pure=True).load(file.read_text())
    return values


def write(values: dict[str, Any], file: Path) -> Path:
    file.write_text(json.dumps(values))  # JSON is YAML
    return file


def effect(file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Complete effect of a launch with this file: torchrun's arguments, and the environment of the processes."""
    from accelerate.utils.launch import _filter_args
    from torch.distributed.run import get_args_parser

    arguments, environment = launch_with(file)
    torchrun = vars(_filter_args(arguments, get_args_parser(), ["train.py"]))
    with monkeypatch.context() as patch:
        for name, value in (environment | {"ACC_LM_CONFIG_FILE": str(file)}).items():
            patch.setenv(name, value)
        return {**torchrun, **environment, **lost_settings()}


def problems(file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Problems that `check_config_file` reports in a process of a launch with this file."""
    monkeypatch.setenv("ACC_LM_CONFIG_FILE", str(file))
    try:
        check_config_file()
    except MachineError as error:
        return error.problems
    return []


# --- ours ----------------------------------------------------------------------------------------------------------


def test_the_configs_of_this_version() -> None:
    assert [file.stem for file in CONFIGS] == sorted(
        ["single_gpu", "cpu", "ddp", "fsdp2", "fsdp2_grad_op", "fsdp2_offload", "hsdp", "deepspeed_zero1", "deepspeed_zero2",
         "deepspeed_zero2_offload", "deepspeed_zero3", "deepspeed_zero3_offload", "deepspeed_zero3_nvme", "deepspeed_zero3_full",
         "multi_node_ddp", "multi_node_hsdp", "multi_node_deepspeed_zero3", "sequence_parallel", "ddp_sequence", "deepspeed_zero3_sequence",
         "tensor_parallel", "fsdp2_tensor_parallel", "multi_node_sequence_parallel", "multi_node_fsdp2_tensor_parallel"]
    )  # fmt: skip


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_reads_it_and_every_key_has_one_comment(file: Path) -> None:
    config = load_config_from_file(str(file))
    assert config.num_processes == PROCESSES.get(file.stem, 2)
    assert config.num_machines == (2 if file.stem.startswith("multi_node_") else 1)
    # Accelerate refuses a precision together with a DeepSpeed file; without one it is "no" as well.
    assert config.mixed_precision == (None if file.stem == "deepspeed_zero3_full" else "no"), (
        "precision comes from the recipe"
    )
    lines = file.read_text().splitlines()
    header = [line for line in lines if line.startswith("# ")]
    assert lines[: len(header)] == header
    for word in ("When to use it:", "Smallest sensible hardware:", "Memory:", "Verified:"):
        assert sum(line.startswith(f"# {word}") for line in header) == 1
    for line in lines[len(header) :]:
        assert line.count(" # ") == 1, line
    assert not re.search("accumulation_steps:|clipping:|batch_size:|checkpointing:", file.read_text()), "the recipe's"


OTHER_VALUE = {
    "MULTI_GPU": "NO", "NO": "DEEPSPEED", "FSDP": "MULTI_GPU", "DEEPSPEED": "MULTI_GPU", "no": "bf16", "cpu": "nvme", "nvme": "cpu",
    "10.0.0.1": "10.0.0.2", "/local_nvme": "/other", "TRANSFORMER_BASED_WRAP": "NO_WRAP", "standard": "pdsh",
    "deepspeed_zero3_full.json": "other.json",
}  # fmt: skip


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_key_of_ours_has_an_effect(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(file, monkeypatch) == []
    before = effect(file, monkeypatch)
    values = read(file)
    for place, key in leaves(values):
        if key == "compute_environment":
            continue  # says which kind of file it is
        kept = place[key]
        place[key] = (
            1
            if key == "num_machines" and kept == 2  # four would be more than the processes
            else not kept
            if isinstance(kept, bool)
            else kept * 2 or 1
            if isinstance(kept, int)
            else OTHER_VALUE[kept]
        )
        after = effect(write(values, tmp_path / "other.yaml"), monkeypatch)
        assert after != before, f"{key} does nothing"
        place[key] = kept


def test_strategies_reach_the_processes_as_requested() -> None:
    def variables(stem: str) -> dict[str, str]:
        return launcher_environment(ROOT / "accelerate_configs" / f"{stem}.yaml")

    for stem, reshard, offload in (("fsdp2", "true", "false"), ("fsdp2_grad_op", "false", "false"), ("fsdp2_offload", "true", "true")):  # fmt: skip
        found = variables(stem)
        assert (found["ACCELERATE_USE_FSDP"], found["FSDP_VERSION"]) == ("true", "2")
        assert (found["FSDP_RESHARD_AFTER_FORWARD"], found["FSDP_OFFLOAD_PARAMS"]) == (reshard, offload)
        assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in found
    for stem in ("hsdp", "multi_node_hsdp"):
        found = variables(stem)
        sizes = found["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"], found["PARALLELISM_CONFIG_DP_SHARD_SIZE"]
        assert sizes == ("2", "2")
    for stem in [file.stem for file in CONFIGS if "deepspeed" in file.stem]:
        found = variables(stem)
        assert found["ACCELERATE_USE_DEEPSPEED"] == "true"
        stage = re.search(r"zero(\d)", stem)
        assert stage
        assert found.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3") == stage[1]
        assert not {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"} & set(found)


def test_the_full_deepspeed_file_has_every_key() -> None:
    settings = json.loads(FULL.read_text())
    assert {key for key, value in settings.items() if value == "auto"} == {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    }  # fmt: skip
    assert settings["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
    }
    assert settings["fp16"] == {
        "enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1,
    }  # fmt: skip
    assert settings["bf16"] == {"enabled": "auto"}


def test_the_deepspeed_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACC_LM_CONFIG_FILE", str(FULL.with_suffix(".yaml")))
    assert resolved_deepspeed_config(FULL.name) == str(FULL)
    assert resolved_deepspeed_config("none") == "none"
    Path(FULL.name).write_text("{}")
    assert resolved_deepspeed_config(FULL.name) == FULL.name, "the current folder comes first, as for Accelerate"
    monkeypatch.delenv("ACC_LM_CONFIG_FILE")
    assert resolved_deepspeed_config("elsewhere.json") == "elsewhere.json"


# --- what Accelerate would ignore ----------------------------------------------------------------------------------


def test_every_section_is_checked() -> None:
    assert sorted(config_file._sections()) == SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_a_misspelt_nested_key_is_refused(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = {"deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}.get(section, "FSDP")
    for right in sorted(known_keys(section)):
        wrong = right.replace("e", "", 1) if "e" in right else f"{right}x"
        file = tmp_path / "typo.yaml"
        file.write_text(f"distributed_type: {strategy}\nnum_processes: 2\n{section}:\n  # here\n  {wrong}: 1\n")
        [line] = problems(file, monkeypatch)
        assert line.startswith(f"{file}:5: {section}.{wrong} must be a key that Accelerate reads there")
        near = re.search(r"did you mean (\w+)\?", line)
        assert near, line
        assert near[1] in known_keys(section)
        file.write_text(file.read_text().replace(wrong, right))
        assert problems(file, monkeypatch) == []


HEAD = "distributed_type: FSDP\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("fsdp_config:\n  fsdp_version: 2\n  fsdp_ofload_params: true\n", 5, "did you mean fsdp_offload_params?"),
        ("fsdp_config: {num_processes: 4}\n", 3, "it belongs to the top of the file"),
        ("fsdp_config: {zero_stage: 3}\n", 3, "it belongs in deepspeed_config"),
        ("parallelism_config:\n  dp_shard_size: 2\n", 4, "did you mean parallelism_config_dp_shard_size?"),
        ("fsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", 5, "use fsdp_reshard_after_forward"),
        ("fsdp_config:\n  version: 2\n  use_orig_params: true\n", 5, "with fsdp_version 2"),
        ("fsdp_config:\n  fsdp_version: 2\n  fsdp_version: 1\n", 5, "fsdp_config.fsdp_version must be given once"),
        ("num_processes: 4\n", 3, "num_processes must be given once"),
        ("num_machines: 3\n", 2, "num_processes must be a multiple of num_machines 3, got 2; Accelerate would start 0"),
        ("fsdp_config: true\n", 3, "fsdp_config must be a mapping of keys, got True"),
        ("deepspeed_config: {zero_stage: 3}\n", 3, "must be in a file of distributed_type DEEPSPEED, got FSDP"),
    ],
)  # fmt: skip
def test_what_accelerate_would_ignore_is_refused(
    text: str, line: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(HEAD + text)
    [problem] = problems(file, monkeypatch)
    assert problem.startswith(f"{file}:{line}: ")
    assert words in problem


def test_accelerate_does_ignore_what_we_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converse: what is refused has no effect, and what is accepted without its prefix has one."""

    def changes(section: str, key: str, value: Any) -> bool:
        with_it = write({"distributed_type": "FSDP", "num_processes": 2, section: {"fsdp_version": 2, key: value}}, tmp_path / "a.yaml")  # fmt: skip
        without = write({"distributed_type": "FSDP", "num_processes": 2, section: {"fsdp_version": 2}}, tmp_path / "b.yaml")  # fmt: skip
        return effect(with_it, monkeypatch) != effect(without, monkeypatch)

    assert changes("fsdp_config", "fsdp_offload_params", True)
    assert changes("fsdp_config", "offload_params", True)
    assert changes("fsdp_config", "fsdp_ignored_modules", "lm_head")
    assert changes("dynamo_config", "backend", "INDUCTOR")
    assert not changes("fsdp_config", "fsdp_ofload_params", True)
    assert changes("parallelism_config", "parallelism_config_dp_shard_size", 2)
    assert not changes("parallelism_config", "dp_shard_size", 2)


def test_a_section_that_the_command_line_requests_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ddp.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    assert len(problems(file, monkeypatch)) == 1
    _, environment = launch_with(file, "--use_fsdp")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", environment["ACCELERATE_USE_FSDP"])
    assert problems(file, monkeypatch) == []


def test_settings_that_the_launcher_loses_are_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "accelerate_configs" / "deepspeed_zero3_nvme.yaml"
    environment = launcher_environment(file)
    lost = {
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/local_nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/local_nvme",
    }
    assert not set(lost) & set(environment), "Accelerate passes them on by now: lost_settings can go"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert lost_settings() == lost
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/mine")
    assert "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH" not in lost_settings()
    values = read(file) | {
        "dynamo_config": {"backend": "INDUCTOR", "dynamo_mode": "default"},
        "enable_cpu_affinity": True,
    }
    monkeypatch.setenv("ACC_LM_CONFIG_FILE", str(write(values, tmp_path / "other.yaml")))
    found = {name: value for name, value in lost_settings().items() if name not in lost}
    assert found == {
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_CPU_AFFINITY": "1",
    }  # fmt: skip


# --- what `accelerate config` writes -------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ANSWERS, ids=lambda file: file.stem)
def test_what_the_questionnaire_writes_is_accepted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(file, monkeypatch) == []


def test_every_key_of_the_questionnaire_is_known() -> None:
    import inspect

    from accelerate.commands.config import cluster

    source = inspect.getsource(cluster)
    found = re.findall(r'(\w+_config)\[(prefix \+ )?"(\w+)"\]', source)
    assert len({section for section, _, _ in found}) == len(SECTIONS)
    for section, prefix, key in found:
        full = section.removesuffix("config") + key if section != "parallelism_config" else f"{section}_{key}"
        assert (full if prefix else key) in known_keys(section)


def test_the_answers_are_what_this_accelerate_writes(tmp_path: Path) -> None:
    record.record(tmp_path)
    assert [file.name for file in sorted(tmp_path.iterdir())] == [file.name for file in ANSWERS]
    for file in ANSWERS:
        assert (tmp_path / file.name).read_text() == file.read_text(), file.name


# --- finding the file of a launch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /x/bin/accelerate launch --config_file a.yaml train.py", ["--config_file", "a.yaml", "train.py"]),
        ("/x/bin/accelerate-launch --cpu train.py", ["--cpu", "train.py"]),
        ("python -X dev -m accelerate.commands.launch train.py", ["train.py"]),
        ("python -m accelerate.commands.accelerate_cli launch train.py", ["train.py"]),
        ("python /x/accelerate/commands/launch.py train.py", ["train.py"]),
        ("python /x/bin/accelerate config --config_file a.yaml", None),
        ("python /x/bin/torchrun --nproc_per_node 2 train.py", None),
        ("python train.py", None),
    ],
)
def test_a_launch_is_recognised_by_its_command_line(command: str, expected: list[str] | None) -> None:
    assert config_file._after_launch(command.split()) == expected


def test_without_a_launch_by_accelerate_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACC_LM_CONFIG_FILE", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert config_file.config_file() is None
    check_config_file()
    assert lost_settings() == {}
    monkeypatch.setenv("ACC_LM_CONFIG_FILE", "nowhere.yaml")
    with pytest.raises(MachineError, match=r"got nothing at 'nowhere\.yaml'"):
        check_config_file()


def test_the_file_of_a_real_launch_is_found(tmp_path: Path) -> None:
    """Named on the command line in either spelling, or Accelerate's default; the script's own arguments are not the launch's."""
    script = tmp_path / "script.py"
    script.write_text("from acc_lm.runtime.settings.config_file import config_file\nprint('found', config_file())\n")
    text = "distributed_type: 'NO'\nnum_processes: 1\n"
    default = tmp_path / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACC")}
    environment["HF_HOME"] = str(tmp_path / "home")
    for file in (tmp_path / "mine.yaml", default):
        file.write_text(text)
    for options, found in (([f"--config-file={tmp_path / 'mine.yaml'}"], tmp_path / "mine.yaml"), ([], default)):
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *options,
            str(script),
            "--config_file",
            "no.yaml",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert f"found {found}\n" in done.stdout, done.stdout + done.stderr
