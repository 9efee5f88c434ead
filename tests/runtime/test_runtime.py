"""A launch gets what it requested, or one line that says why not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import LAUNCH_VARIABLES, ROOT, Launch, launcher_environment, run_everywhere, run_training
from test_step import RaggedRows, make_config, make_model

from acc_lm import errors
from acc_lm.cli import main
from acc_lm.config import TrainingConfig
from acc_lm.errors import ConfigError, MachineError
from acc_lm.stop import StopRequest

CONFIGS = ROOT / "accelerate_configs"
BIN = Path(sys.executable).parent


def launch(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A real launch, as typed in a separate shell."""
    clean = {key: value for key, value in os.environ.items() if not LAUNCH_VARIABLES.match(key)}
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def environment_of(tmp_path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((tmp_path / "run" / "environment.json").read_text())
    return values


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_accelerate_launch_with_ddp_yaml_trains_two_processes(tiny: list[str], tmp_path: Path) -> None:
    done = launch(
        ["accelerate", "launch", "--config_file", str(CONFIGS / "ddp.yaml"), "--num_processes", "2", "--main_process_port", free_port(),
         "train.py", *tiny, "training.micro_batch_size=3"]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    environment = environment_of(tmp_path)
    assert (environment["strategy"], environment["engine"], environment["num_processes"]) == (
        "ddp",
        "DistributedDataParallel",
        2,
    )
    assert environment["is_rehearsal"] is True
    assert "rehearsal: the real engine on CPU processes" in done.stdout
    assert "global batch  12 = 3 micro x 2 processes x 2 accumulation" in done.stdout
    assert done.stdout.count("strategy ") == 1, "printed once"
    assert "launch" in environment["launch_command"]
    assert "destroy_process_group" not in done.stderr


def test_torchrun_trains_two_processes(tiny: list[str], tmp_path: Path) -> None:
    done = launch(
        [
            "torchrun",
            "--nproc_per_node",
            "2",
            "--master_port",
            free_port(),
            "train.py",
            *tiny,
        ]
    )
    assert done.returncode == 0, done.stderr
    assert (environment_of(tmp_path)["strategy"], environment_of(tmp_path)["num_processes"]) == ("ddp", 2)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["single_gpu", "cpu"])
def test_accelerate_launch_with_one_process(config: str, tiny: list[str], tmp_path: Path) -> None:
    done = launch(["accelerate", "launch", "--config_file", str(CONFIGS / f"{config}.yaml"), "train.py", *tiny])
    assert done.returncode == 0, done.stderr
    assert (environment_of(tmp_path)["strategy"], environment_of(tmp_path)["num_processes"]) == ("single", 1)
    assert environment_of(tmp_path)["is_rehearsal"] is False


def test_accelerate_config_default_then_accelerate_launch(tiny: list[str], tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "home")}  # where accelerate keeps its default config
    assert launch(["accelerate", "config", "default"], **home).returncode == 0
    assert (tmp_path / "home/accelerate/default_config.yaml").is_file()
    done = launch(["accelerate", "launch", "train.py", *tiny], **home)
    assert done.returncode == 0, done.stderr
    assert environment_of(tmp_path)["num_processes"] == 1


def test_plain_python_trains_one_process(tiny: list[str], tmp_path: Path) -> None:
    done = launch(["python", "train.py", *tiny])
    assert done.returncode == 0, done.stderr
    assert environment_of(tmp_path)["num_processes"] == 1
    assert environment_of(tmp_path)["launch_command"][-len(tiny) :] == tiny
    noise = [line for line in done.stderr.splitlines() if line.strip()]
    assert noise == [], "a good run has nothing to say on stderr"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--cpu", "--num_processes", "2"], id="cpu flag"),
        pytest.param(["--config_file", "multi_cpu.yaml"], id="MULTI_CPU", marks=pytest.mark.slow),
    ],
)
def test_a_launch_that_silently_starts_one_process_is_refused(
    options: list[str], tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "multi_cpu.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\n"
    )
    options = [str(tmp_path / option) if option.endswith(".yaml") else option for option in options]
    done = launch(["accelerate", "launch", *options, "train.py", *tiny])
    assert done.returncode == 1, "accelerate launch turns every code into 1"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "must start all requested processes, got one" in errors[0]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("environment_error", 4)


NOTHING_TO_LOAD = ["model.config=null", "model.name_or_path=/nowhere/model", "data.files=[/nowhere/text.jsonl]"]
FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}


def by_hand(**settings: Any) -> dict[str, Any]:
    """An Accelerate config that names a DeepSpeed config written by hand."""
    return {"by_hand": {"zero_optimization": {"stage": 2}} | settings}


DDP = {"distributed_type": "MULTI_GPU"}


def parallel(engine: dict[str, Any] = FSDP, **sizes: int) -> dict[str, Any]:
    return engine | {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in sizes.items()}}


def compiled(**settings: Any) -> dict[str, Any]:
    return {
        "distributed_type": "MULTI_GPU",
        "dynamo_config": {f"dynamo_{name}": value for name, value in settings.items()},
    }


# (the Accelerate config, or variables that no config can make), arguments, processes, what the line says
REFUSED: dict[str, tuple[dict[str, Any], list[str], int, str]] = {
    "fp16 by the launch": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, [], 1, "mixed_precision of the launch must be bf16 or no on a CPU, got fp16"),
    "fp16 by the recipe": ({}, ["training.mixed_precision=fp16"], 1, "training.mixed_precision must be bf16 or no on a CPU, got fp16"),
    "fp8 by the recipe": ({}, ["training.mixed_precision=fp8"], 1, "training.mixed_precision must be bf16 or no on a CPU, got fp8"),
    "fp16 under FSDP2": (FSDP, ["training.mixed_precision=fp16"], 2, "training.mixed_precision must be bf16 or no on a CPU, got fp16"),
    "restarts that hang": ({"TORCHELASTIC_MAX_RESTARTS": "2"}, [], 2, "max_restarts must be 0 with the static rendezvous, which hangs after the first death, got 2; add --rdzv_backend c10d"),
    "a debugger that crashes": ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, [], 2, "TORCH_DISTRIBUTED_DEBUG must be OFF or INFO under DDP on CPU processes"),
    "Megatron-LM": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, [], 2, "must ask for one process, DDP, FSDP2 or DeepSpeed, got Megatron-LM"),
    "nccl on CPU processes": ({}, ["distributed.backend=nccl"], 2, "distributed.backend must be gloo or null on CPU processes, got nccl"),
    "bf16 hook on CPU processes": ({}, ["distributed.comm_hook=bf16"], 2, "distributed.comm_hook must be none, fp16, power_sgd or batched_power_sgd on CPU processes, got bf16"),
    "a hook that fails in torch": ({}, ["distributed.comm_hook=batched_power_sgd", "training.max_steps=1000"], 2, "which fails inside torch from step 1000 on"),
    "one graph under DDP": (compiled(backend="EAGER", use_fullgraph=True), [], 2, "dynamo_use_fullgraph must be false under ddp, which breaks the graph to communicate, got true"),
    "CUDA graphs and accumulation": (compiled(backend="INDUCTOR", mode="reduce-overhead"), ["training.micro_batch_size=3"], 2, "dynamo_mode must be default or max-autotune-no-cudagraphs with 2 micro-batches in a step"),
    # FSDP
    "units by size": (FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}}, [], 2, "fsdp_auto_wrap_policy must be TRANSFORMER_BASED_WRAP or NO_WRAP, got SIZE_BASED_WRAP"),
    "units by nonsense": (FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NONSENSE"}}, [], 2, "the settings of the launch must be ones that Accelerate takes, got: Invalid auto wrap policy: NONSENSE"),
    "FSDP1's word": (FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}}, [], 2, "fsdp_reshard_after_forward must be true or false with fsdp_version 2, got SHARD_GRAD_OP"),
    "shards of one process": (parallel(dp_replicate=2, dp_shard=1), [], 2, "parallelism_config_dp_shard_size must be at least 2, got 1, which shards nothing"),
    "FSDP1 by name": (FSDP | {"fsdp_config": {"fsdp_version": 1}}, [], 2, "fsdp_version must be 2, got 1, which torch no longer develops; use accelerate_configs/fsdp2.yaml"),
    "FSDP1 by default": (FSDP | {"fsdp_config": {"fsdp_offload_params": False}}, [], 2, "fsdp_version must be 2, got 1"),
    "a second switch": (FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}, [], 2, "fsdp_activation_checkpointing must be false in the Accelerate config, got true; the recipe has one switch"),
    "tensor parallel": (parallel(tp=2), [], 2, "parallelism_config_dp_shard_size must be at least 2 under FSDP2, got 1"),
    "no part of a row": ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "0"}, [], 2, "parallelism_config_sp_size must be at least 1, got 0"),
    "rows cut twice": ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2", "PARALLELISM_CONFIG_CP_SIZE": "2"}, [], 4, "only one of parallelism_config_cp_size and parallelism_config_sp_size must be above 1, got 2 and 2"),
    "parts of layers and rows": (parallel(DDP, tp=2, sp=2), [], 4, "parallelism_config_sp_size must be 1 with tp_size 2 and without use_fsdp, got 2; give both sizes in accelerate_configs/fsdp2_tensor_parallel.yaml"),
    "parts for fewer processes": (parallel(DDP, sp=2), [], 3, "parallelism_config_sp_size must divide the number of processes 3, got 2"),
    "parts in a mesh for fewer processes": (parallel(dp_shard=2, sp=2), [], 2, "got dp_replicate_size 1 x dp_shard_size 2 x sp_size 2 for 2 processes"),
    "parts and copies of another size": (parallel(DDP, dp_replicate=4, sp=2), [], 4, "a parallelism_config must come with use_fsdp, got dp_replicate_size 4 x dp_shard_size 1 under ddp for 4 processes"),
    "parts and shards without shards": (parallel(DDP, dp_shard=2, sp=2), [], 4, "got dp_replicate_size 1 x dp_shard_size 2 under ddp for 4 processes"),
    "parts and copies of a sharding engine": (parallel(DEEPSPEED, dp_replicate=2, sp=2), [], 4, "got dp_replicate_size 2 x dp_shard_size 1 under deepspeed_zero2 for 4 processes"),
    "a mesh of a sharding engine": (parallel(DEEPSPEED, dp_shard=2), [], 2, "got dp_replicate_size 1 x dp_shard_size 2 under deepspeed_zero2 for 2 processes"),
    "a mesh for more processes": (parallel(dp_replicate=2, dp_shard=2), [], 2, "parallelism_config must multiply to the number of processes, got dp_replicate_size 2 x dp_shard_size 2 for 2 processes"),
    "a mesh for fewer processes": (parallel(dp_shard=2), [], 3, "got dp_replicate_size 1 x dp_shard_size 2 for 3 processes"),
    "a mesh without FSDP": ({"distributed_type": "MULTI_GPU", **{k: v for k, v in parallel(dp_shard=2).items() if k == "parallelism_config"}}, [], 2, "a parallelism_config must come with use_fsdp"),
    # DeepSpeed
    "ZeRO stage 0": (DEEPSPEED | {"deepspeed_config": {"zero_stage": 0}}, [], 2, "the ZeRO stage of the Accelerate config must be 1, 2 or 3, got 0, which shards nothing"),
    "ZeRO stage 0 by hand": (by_hand(zero_optimization={"stage": 0}), [], 2, "the ZeRO stage of the Accelerate config must be 1, 2 or 3, got 0"),
    "no ZeRO by hand": (by_hand(zero_optimization={}), [], 2, "the ZeRO stage of the Accelerate config must be 1, 2 or 3, got 0"),
    "float64 under DeepSpeed": (DEEPSPEED, ["model.dtype=float64"], 2, "model.dtype must be float32 under DeepSpeed, which updates in float32 whatever the model's dtype, got float64"),
    "bfloat16 under DeepSpeed": (DEEPSPEED, ["model.dtype=bfloat16"], 2, "model.dtype must be float32 under DeepSpeed, which updates in float32 whatever the model's dtype, got bfloat16"),
    "a section that is none": (by_hand(fp16=True), [], 2, "ds.json: fp16 must be a mapping, got true"),
    "a stage in quotes": (by_hand(zero_optimization={"stage": "2"}), [], 2, "the ZeRO stage of the Accelerate config must be 1, 2 or 3, got '2'; write one of these numbers"),
    "no such file": (DEEPSPEED | {"deepspeed_config": {"deepspeed_config_file": "/nowhere.json"}}, [], 2, "deepspeed_config_file must exist, got '/nowhere.json'"),
    "no JSON": ({"by_hand": "zero: 2"}, [], 2, "ds.json must be JSON, got: Expecting value"),
    "another global batch": (by_hand(train_batch_size=16), [], 2, "train_batch_size must be auto or the recipe's value (training.global_batch_size: 12), got 16"),
    "another micro-batch": (by_hand(train_micro_batch_size_per_gpu=2), [], 2, "train_micro_batch_size_per_gpu must be auto or the recipe's value (training.micro_batch_size: 6), got 2"),
    "another accumulation": (by_hand(gradient_accumulation_steps=4), [], 2, "gradient_accumulation_steps must be auto or the recipe's value (training.global_batch_size / (micro_batch_size x processes): 1), got 4"),
    "another clipping": (by_hand(gradient_clipping=0.3), [], 2, "gradient_clipping must be auto or the recipe's value (optimizer.max_grad_norm: 1.0), got 0.3"),
    "an optimizer by hand": (by_hand(optimizer={"type": "AdamW"}), [], 2, "optimizer must be left out, got one; the recipe's optimizer section is used instead"),
    "a scheduler by hand": (by_hand(scheduler={"type": "WarmupLR"}), [], 2, "scheduler must be left out, got one; the recipe's scheduler section is used instead"),
    "bf16 by hand": (by_hand(bf16={"enabled": True}), [], 2, "bf16.enabled must be auto or false, got true; precision comes from the recipe"),
    "no bf16 by hand": (by_hand(bf16={"enabled": False}), ["training.mixed_precision=bf16"], 2, "bf16.enabled must be auto or true, got false; precision comes from the recipe"),
    "fp16 by hand": (by_hand(fp16={"enabled": True}), [], 2, "fp16.enabled must be auto or false, got true; precision comes from the recipe"),
    "autocast by hand": (by_hand(torch_autocast={"enabled": True}), [], 2, "torch_autocast must be left out; precision comes from the recipe"),
}  # fmt: skip


def environment_for(asked: dict[str, Any], num_processes: int, folder: Path) -> dict[str, str]:
    """Environment of the processes of such a launch; Accelerate's own functions make it wherever a config can request it."""
    if not {"distributed_type", "by_hand"} & set(asked):
        return asked
    if "by_hand" in asked:
        settings = asked["by_hand"]
        (folder / "ds.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
        asked = DEEPSPEED | {"deepspeed_config": {"deepspeed_config_file": str(folder / "ds.json")}}
    file = folder / "launch.yaml"
    file.write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", "num_processes": num_processes, **asked}))
    return launcher_environment(file, num_processes)


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_launch_is_one_line_and_exit_code_4_before_any_loading(
    name: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, arguments, num_processes, says = REFUSED[name]
    environment = environment_for(asked, num_processes, tmp_path)
    finished = run_training([*tiny, *NOTHING_TO_LOAD, *arguments], num_processes, environment, timeout=60, expect=4)
    (line,) = finished.errors
    assert says in line
    assert "; " in line, "what to change"
    assert "Traceback" not in finished.output
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "environment_error"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"summary.json", "train.log"}
    if environment and not (tmp_path / "launch.yaml").exists():
        return  # no config requests that
    file = (
        tmp_path / "launch.yaml" if environment else CONFIGS / ("ddp.yaml" if num_processes > 1 else "single_gpu.yaml")
    )
    recipe = ["--config", tiny[1], *tiny[2:], *NOTHING_TO_LOAD, *arguments]
    assert main(["doctor", "--config_file", str(file), "--num_processes", str(num_processes), *recipe]) == 4
    assert capsys.readouterr().err.splitlines() == [line], "the doctor says the same"


WIDE = "model.config={model_type: llama, hidden_size: 16, intermediate_size: 8192, num_hidden_layers: 2, num_attention_heads: 2}"
FIND = "training.find_micro_batch_size=true"
# As above, for problems that show only once the recipe is read, and with an exit code
REFUSED_RECIPES: dict[str, tuple[dict[str, Any], list[str], int, str]] = {
    "another model's block": (FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}}, [], 4, "fsdp_transformer_layer_cls_to_wrap must name a class of the model, got BertLayer; leave it out, the model's own is LlamaDecoderLayer"),
    "a size that is told once": (DEEPSPEED, [FIND], 2, "training.find_micro_batch_size must be false under DeepSpeed, which fixes the size when it is built"),
    "a search that hangs in a part": (parallel(DDP, sp=2), [FIND], 2, "training.find_micro_batch_size must be false with rows in parts, where a process that runs out of memory leaves the others waiting for its part"),
    "heads that do not divide": (parallel(DDP, sp=2), ["model.config={model_type: llama, hidden_size: 24, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 3, num_key_value_heads: 3}"], 2, "parallelism_config_sp_size (or cp_size) must divide the 3 attention heads of the model, and divide or be a multiple of its 3 key-value heads, got 2; nearest: 1 or 3"),
    "a window in parts": (parallel(DDP, sp=2), ["model.config={model_type: mistral, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, sliding_window: 8}"], 2, "parallelism_config_sp_size (or cp_size) must be 1 for a model of type mistral, got 2 for attention that needs sliding_window"),
    "rotations by length in parts": (parallel(DDP, sp=2), ["model.config={rope_parameters: {rope_type: dynamic, factor: 2.0, rope_theta: 10000.0}}"], 2, "parallelism_config_sp_size (or cp_size) must be 1 for a model of type llama, got 2 for positions that are rotated by the length of a row (rope_type dynamic)"),
    "a recurrent model in parts": (parallel(DDP, sp=2), ["model.config={model_type: mamba, hidden_size: 16, state_size: 8, num_hidden_layers: 1}"], 2, "parallelism_config_sp_size (or cp_size) must be 1 for a model of type mamba, got 2 for attention that needs its own code"),
    "a search that hangs": (FSDP, [FIND], 2, "training.find_micro_batch_size must be false under fsdp2, where a process that runs out of memory leaves the others waiting"),
    "buckets that mix": ({"distributed_type": "MULTI_GPU"}, ["distributed.comm_hook=power_sgd", WIDE], 4, "distributed.bucket_cap_mb must put all gradients into one bucket"),
    "no text": ({"distributed_type": "MULTI_GPU"}, ["data.files=[/nowhere/text.jsonl]"], 3, "data.files must name an existing file or folder, got '/nowhere/text.jsonl'"),
    "no text to compare with": ({"distributed_type": "MULTI_GPU"}, ["data.evaluation_sets={other: [/nowhere/text.jsonl]}"], 3, "data.evaluation_sets.other must name an existing file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_RECIPES)
def test_the_doctor_prints_the_same_line_for_a_recipe_that_does_not_fit_the_launch(
    name: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, arguments, code, says = REFUSED_RECIPES[name]
    environment = environment_for(asked, 2, tmp_path)
    finished = run_training([*tiny, *arguments], 2, environment, timeout=60, expect=code)
    (line,) = finished.errors
    assert says in line
    assert not (tmp_path / "run/config.yaml").exists(), "before anything is made"
    command = ["doctor", "--config_file", str(tmp_path / "launch.yaml"), "--num_processes", "2", *tiny, *arguments]
    assert main(command) == code
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_launch_is_recognised_by_all_of_its_variables_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A single one is left over from another launch, or a launcher forgot the others."""
    from acc_lm.errors import MachineError
    from acc_lm.launcher import is_main_process
    from acc_lm.run_files.output_dir import open_output_dir
    from acc_lm.run_files.summary import write_failure
    from acc_lm.runtime.launch.request import read_launch

    def read(**variables: str) -> tuple[str, int]:
        for name in list(os.environ):
            if LAUNCH_VARIABLES.match(name):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        asked = read_launch(None)
        return asked.strategy, asked.num_processes

    assert read() == read(RANK="1", LOCAL_RANK="1") == read(WORLD_SIZE="1") == ("single", 1)
    assert read(MASTER_PORT="29500", ACCELERATE_MIXED_PRECISION="no") == ("single", 1), "the cluster's"
    assert read(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1") == ("ddp", 1), "torchrun's, which Accelerate wraps"
    assert read(RANK="0", WORLD_SIZE="1", MASTER_PORT="29500", MASTER_ADDR="here") == ("single", 1), (
        "a job of one worker"
    )
    for variables, says in {
        (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")): "fsdp2, which ACCELERATE_USE_FSDP=true requests, must be started by a launcher, got one process",
        (("WORLD_SIZE", "8"),): "RANK must be set next to WORLD_SIZE=8, as every launcher does, got none",
        (("WORLD_SIZE", "abc"),): "WORLD_SIZE must be a whole number, as launchers set it, got 'abc'",
        (("WORLD_SIZE", "2"), ("RANK", "2")): "RANK must be below WORLD_SIZE=2, got 2",
        (("ACCELERATE_MIXED_PRECISION", "fp17"),): "mixed_precision of the launch must be no, bf16, fp16 or fp8, got 'fp17'",
        (("ACCELERATE_DYNAMO_BACKEND", "NONE"),): "must be ones that Accelerate takes, got: 'NONE' is not a valid DynamoBackend",
    }.items():  # fmt: skip
        with pytest.raises(MachineError, match=says):
            read(**dict(variables))
    read()
    monkeypatch.setenv("RANK", "1")
    assert is_main_process()
    with open_output_dir(tmp_path, alone=True):
        assert (tmp_path / ".lock").exists()
    write_failure(str(tmp_path), "failed", 1, "a test")
    assert json.loads((tmp_path / "summary.json").read_text())["rank"] == 0


def test_a_job_of_one_worker_trains(tiny: list[str], tmp_path: Path) -> None:
    """As Kubernetes' templates start it; Accelerate sees one process, and no engine to wrap it in."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    run_training([*tiny, "training.max_steps=2", "schedule.warmup_steps=1"], environment=variables)
    assert (environment_of(tmp_path)["strategy"], environment_of(tmp_path)["num_processes"]) == ("single", 1)


def test_the_only_process_of_torchrun_is_wrapped_on_a_cpu_and_not_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.runtime.engines.identity import _live_strategy
    from acc_lm.runtime.settings.strategy import requested_strategy

    for name, value in torchrun_variables(0, 1, 1234).items():
        monkeypatch.setenv(name, value)
    assert requested_strategy() == "ddp"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert requested_strategy() == _live_strategy(torch.nn.Linear(1, 1), 1) == "single"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert requested_strategy() == "ddp"


def test_fp16_with_offloaded_parameters_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.errors import MachineError
    from acc_lm.runtime.launch.doctor import check_config

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    fp16 = make_config(2, 1)
    fp16 = fp16.model_copy(update={"training": fp16.training.model_copy(update={"mixed_precision": "fp16"})})
    with pytest.raises(MachineError, match="fsdp_offload_params must be false with fp16"):
        check_config(CONFIGS / "fsdp2_offload.yaml", 2, fp16)


def test_gloo_that_finds_no_route_names_the_variable_to_set() -> None:
    from acc_lm.errors import MachineError
    from acc_lm.runtime import explain

    words = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused, remote=[127.0.1.1]:29573"
    found = explain(RuntimeError(words), make_config(2, 1))
    assert isinstance(found, MachineError)
    assert "remote=[127.0.1.1]:29573; set GLOO_SOCKET_IFNAME on every machine" in str(found)


def test_requirements_missing_on_a_gpu_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals that no CPU machine can trigger, tested with the answers that such a machine would give."""
    from acc_lm.errors import MachineError
    from acc_lm.runtime.launch.refusals import checked_precision, refuse_missing_devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(MachineError, match="must be fp16 or no on Old GPU, got bf16, which it does not support"):
        checked_precision("bf16", has_accelerator=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(
        MachineError, match="not start more processes than this machine has GPUs, got 3 for 2; use --num_processes 2"
    ):
        refuse_missing_devices(has_accelerator=True)
    refuse_missing_devices(has_accelerator=False)  # CPU processes may be more than there are GPUs


def test_settings_of_the_launch_that_the_recipe_overrides_are_a_note(tiny: list[str], tmp_path: Path) -> None:
    settings = {"zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.1}
    environment = environment_for(DEEPSPEED | {"deepspeed_config": settings}, 2, tmp_path)
    output = run_training([*tiny, "training.max_steps=2", "schedule.warmup_steps=1"], 2, environment).output
    assert "gradient_accumulation_steps 4 of the Accelerate config is overridden: the recipe sets it to 1" in output
    assert "gradient_clipping 0.1 of the Accelerate config is overridden: the recipe sets it to 1.0" in output


def test_a_process_with_a_small_share_takes_it_in_one_micro_batch() -> None:
    from acc_lm.config import TrainingConfig
    from acc_lm.runtime import split_global_batch

    def split(global_batch: int, micro: int, num_processes: int) -> tuple[int, int]:
        training = TrainingConfig(max_steps=1, global_batch_size=global_batch, micro_batch_size=micro)
        return split_global_batch(training, num_processes)

    assert [split(16, 16, 1), split(16, 16, 2), split(16, 4, 2), split(16, 8, 4)] == [(16, 1), (8, 1), (4, 2), (4, 1)]


def test_processes_that_do_not_find_each_other_are_refused() -> None:
    """Two processes that are each "one of one" would train two models into the same folder."""

    def run() -> str:
        import accelerate

        from acc_lm.errors import MachineError
        from acc_lm.runtime import build_accelerator

        class Alone(accelerate.Accelerator):
            num_processes = 1

        accelerate.Accelerator = Alone  # type: ignore[misc]
        try:
            build_accelerator(make_config(2, 1))
        except MachineError as error:
            torch.distributed.barrier()  # neither exits while the other still looks for it
            return str(error)
        return "nothing was refused"

    for message in run_everywhere(run, 2):
        assert "got 2 processes (WORLD_SIZE) where it sees 1" in message


def test_a_global_batch_that_does_not_divide_names_all_three_numbers(tiny: list[str]) -> None:
    finished = run_training([*tiny, "training.micro_batch_size=4"], num_processes=2, expect=2)
    (line,) = finished.errors
    assert "must be a multiple of micro_batch_size 4 x 2 processes = 8, got 12; nearest: 8, 16" in line


def test_a_global_batch_smaller_than_a_micro_batch_of_each_must_only_divide() -> None:
    from acc_lm.runtime import split_global_batch

    def split(size: int) -> tuple[int, int]:
        return split_global_batch(TrainingConfig(max_steps=1, global_batch_size=size, micro_batch_size=6), 4)

    assert split(12) == (3, 1)
    with pytest.raises(
        ConfigError, match="a multiple of micro_batch_size 6 and of the 4 processes, got 18; nearest: 12, 24"
    ):
        split(18)
    assert split(24) == (6, 1)


def torchrun_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """Variables that torchrun leaves to a process when it does not host the store itself, as on machines that name a master."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank), "ROLE_NAME": "default",
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip


@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero2"])
def test_a_port_in_use_is_one_line_with_its_owner(config: str, tiny: list[str], tmp_path: Path) -> None:
    # Another program: files held open by this process would be held by the processes that it forks as well.
    code = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        port = int(owner.stdout.readline())
        variables = launcher_environment(CONFIGS / f"{config}.yaml", 2) | torchrun_variables(0, 2, port)
        try:
            finished = run_training([*tiny, *NOTHING_TO_LOAD], environment=variables, timeout=60, expect=4)
        finally:
            owner.kill()
    (line,) = finished.errors
    assert (
        f"the rendezvous at 127.0.0.1:{port} must be free, got: it is in use by process {owner.pid}; "
        "choose another --main_process_port (0 picks one)"
    ) in line
    assert "Traceback" not in finished.output


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (1, "the rendezvous at 127.0.0.1:{port} must be reachable, got no answer; check main_process_ip"),
        (
            0,
            "all 2 processes must come to the rendezvous at 127.0.0.1:{port}, got 1; start the launch on every machine",
        ),
    ],
    ids=["the first is missing", "the second is missing"],
)
def test_a_rendezvous_that_a_process_misses_is_one_line(rank: int, expected: str, tiny: list[str]) -> None:
    port = int(free_port())
    finished = run_training(
        [*tiny, *NOTHING_TO_LOAD, "distributed.timeout_seconds=2"], environment=torchrun_variables(rank, 2, port), timeout=60, expect=4
    )  # fmt: skip
    line = finished.errors[-1]
    assert expected.format(port=port) in line
    assert "Traceback" not in finished.output


def test_an_error_is_printed_once_by_the_main_process(tiny: list[str]) -> None:
    finished = run_training([*tiny, "training.max_stpes=3"], num_processes=2, expect=2)
    assert len(finished.errors) == 1
    assert finished.outputs[1].splitlines()[0] == "error: only process 1 has this error:", "no launcher ended it here"


def test_the_launchers_signal_ends_a_process_that_has_the_main_ones_error(tmp_path: Path) -> None:
    """torchrun sends SIGTERM when the main process has ended; this one must not claim then that it alone has the error."""

    def fail() -> int:
        errors.time = SimpleNamespace(sleep=lambda seconds: os.kill(os.getpid(), signal.SIGTERM))  # type: ignore[assignment]
        try:
            with StopRequest(tmp_path).listening():
                raise ConfigError("a wrong key")
        except ConfigError as error:
            errors.print_problems(error)
        return 2

    finished = Launch(fail, 1, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).wait(60)
    assert finished.codes == [-signal.SIGTERM]
    assert finished.output == ""


@pytest.mark.parametrize("chosen", [True, False])
def test_ddp_settings_and_the_timeout_reach_the_engine(chosen: bool) -> None:
    """Each of them set away from its default once, read back from the wrapped model and the live process group."""

    def run() -> list[Any]:
        import torch.distributed as dist

        from acc_lm.runtime import build_accelerator

        settings = {
            "find_unused_parameters": chosen, "gradient_as_bucket_view": chosen, "static_graph": chosen, "broadcast_buffers": chosen,
            "bucket_cap_mb": 3 if chosen else 30, "timeout_seconds": 77 if chosen else 99,
        }  # fmt: skip
        accelerator = build_accelerator(make_config(2, 1, distributed=settings))
        model = accelerator.prepare(make_model("llama", "float32"))
        timeout = dist.distributed_c10d._get_default_group()._get_backend(accelerator.device).options._timeout
        return [
            model.find_unused_parameters, model.gradient_as_bucket_view, model.static_graph, model.broadcast_buffers,
            model.bucket_bytes_cap, timeout.total_seconds(),
        ]  # fmt: skip

    expected = [True] * 4 + [3 * 2**20, 77.0] if chosen else [False] * 4 + [30 * 2**20, 99.0]
    assert run_everywhere(run, 2) == [expected] * 2


HOOKS = {
    "none": [],
    "fp16": [("fp16_compress_hook", None)],
    "power_sgd": [("powerSGD_hook", (3, 7))],
    "batched_power_sgd": [("batched_powerSGD_hook", (3, 1000))],
}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_communication_hook_of_the_recipe_is_registered_with_its_arguments(hook: str) -> None:
    def run() -> tuple[list[Any], list[float]]:
        from acc_lm.runtime import Gradients, build_accelerator
        from acc_lm.training.step import train_step

        arguments = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 7} if "power" in hook else {}
        if hook == "batched_power_sgd":
            arguments["start_powerSGD_iter"] = 1000
        config = make_config(4, 2, distributed={"comm_hook": hook, "comm_hook_arguments": arguments})
        accelerator = build_accelerator(config)
        model = make_model("llama", "float32")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        gradients, norms = Gradients(accelerator, model), []
        # Past the step at which PowerSGD begins to compress; its batched form fails there in torch itself (2.13), so that a run
        # which would get there is refused.
        for step in range(1, 6 if hook == "batched_power_sgd" else 11):
            batch = RaggedRows(empty=set()).__getitems__([accelerator.process_index * 2 + 1, step % 2])
            outcome = train_step(
                accelerator, model, optimizer, [batch], step=step, seed=0, num_targets=20, max_grad_norm=1.0, gradients=gradients
            )  # fmt: skip
            norms.append(float(outcome.grad_norm))
        found = [
            (function.__name__, state and (state.matrix_approximation_rank, state.start_powerSGD_iter))
            for function, state in model._comm_hooks
        ]
        return found, norms

    (found, norms), (_, other) = run_everywhere(run, 2)
    assert found == HOOKS[hook]
    assert norms == other, "compressed or not, both processes must have the same gradients"


def test_the_effects_of_a_hook_on_a_run_are_reported(tiny: list[str]) -> None:
    quick = [*tiny, "training.max_steps=2", "schedule.warmup_steps=1"]
    output = run_training([*quick, "distributed.comm_hook=power_sgd"], 2).output
    assert "power_sgd keeps state that checkpoints do not contain: a resumed run is not bit-identical" in output
    environment = launcher_environment(CONFIGS / "fsdp2.yaml", 2)
    output = run_training(
        [*quick, "output_dir=" + quick[2].split("=")[1] + "-2", "distributed.comm_hook=fp16"], 2, environment
    ).output
    assert "distributed.comm_hook fp16 is for DDP and does nothing under fsdp2" in output


def test_bf16_is_used_when_the_recipe_or_the_launch_says_so(tiny: list[str], tmp_path: Path) -> None:
    by_recipe = run_training([*tiny, "training.mixed_precision=bf16"], environment={"ACCELERATE_MIXED_PRECISION": "no"})
    assert "float32 weights, bfloat16 autocast compute, float32 reduction" in by_recipe.output
    assert "precision bf16 comes from the recipe and overrides the Accelerate config's no" in by_recipe.output
    run_training([*tiny, f"output_dir={tmp_path / 'b'}"], environment={"ACCELERATE_MIXED_PRECISION": "bf16"})
    run_training([*tiny, f"output_dir={tmp_path / 'c'}"])
    first, second, plain = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "b", "c"))
    losses = [json.loads(lines[0])["train/loss"] for lines in (first, second, plain)]
    assert losses[0] == losses[1] != losses[2]
    assert abs(losses[0] - losses[2]) < 2e-2 * losses[2]


def test_compiling_through_the_launch_changes_no_names(tiny: list[str], tmp_path: Path) -> None:
    run_training([*tiny, "training.max_steps=3"], environment={"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, timeout=240)
    run_training([*tiny, "training.max_steps=3", f"output_dir={tmp_path / 'plain'}"])
    from safetensors import safe_open

    names, losses = [], []
    for name in ("run", "plain"):
        for file in ("final/model.safetensors", "checkpoints/step-00000003/tensors-00000-of-00001.safetensors"):
            with safe_open(tmp_path / name / file, "pt") as tensors:
                names.append(sorted(tensors.keys()))
        losses.append(json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["eval/loss"])
    assert names[0] == names[2]
    assert names[1] == names[3]
    assert abs(losses[0] - losses[1]) < 1e-5 * losses[1]


def test_a_python_without_docstrings_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    import acc_lm.runtime.launch.accelerator
    from acc_lm.runtime import quiet_libraries

    monkeypatch.setattr(acc_lm.runtime.launch.accelerator, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    with pytest.raises(MachineError, match="python must run with docstrings, which transformers reads, got -OO"):
        quiet_libraries()
