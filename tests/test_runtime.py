"""A launch gets what it asked for, or one line that says why not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import LAUNCH_VARIABLES, ROOT, run_everywhere, run_training

CONFIGS = ROOT / "accelerate_configs"
BIN = Path(sys.executable).parent


def launch(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A real launch, as typed in a shell of its own."""
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
    "options", [["--cpu", "--num_processes", "2"], ["--config_file", "multi_cpu.yaml"]], ids=["cpu flag", "MULTI_CPU"]
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
    assert "must start the processes it was asked for, got one process" in errors[0]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("environment_error", 4)


REFUSED = [
    ({"ACCELERATE_MIXED_PRECISION": "fp16"}, [], "must be bf16 or no on a CPU, got fp16"),
    ({}, ["training.mixed_precision=fp16"], "training.mixed_precision must be bf16 or no on a CPU, got fp16"),
    ({}, ["training.mixed_precision=fp8"], "training.mixed_precision must be bf16 or no on a CPU, got fp8"),
    ({"ACCELERATE_USE_FSDP": "true"}, [], "got FSDP, which this version does not run yet"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, [], "got DeepSpeed, which this version does not run yet"),
    ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "1234"}, [], "got one process"),
]


@pytest.mark.parametrize(("environment", "arguments", "says"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_what_a_machine_cannot_do_is_refused_with_exit_code_4(
    environment: dict[str, str], arguments: list[str], says: str, tiny: list[str], tmp_path: Path
) -> None:
    finished = run_training([*tiny, *arguments], environment=environment, expect=4)
    (line,) = finished.errors
    assert says in line
    assert "Traceback" not in finished.output
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "environment_error"


def test_a_process_whose_share_is_small_takes_it_at_once() -> None:
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

        from acc_lm.config import DistributedConfig, TrainingConfig
        from acc_lm.errors import MachineError
        from acc_lm.runtime import build_accelerator

        class Alone(accelerate.Accelerator):
            num_processes = 1

        accelerate.Accelerator = Alone  # type: ignore[misc]
        try:
            build_accelerator(TrainingConfig(max_steps=1, global_batch_size=2, micro_batch_size=1), DistributedConfig())
        except MachineError as error:
            torch.distributed.barrier()  # neither leaves while the other still looks for it
            return str(error)
        return "nothing was refused"

    for message in run_everywhere(run, 2):
        assert "got 2 processes (WORLD_SIZE) where Accelerate sees 1" in message


def test_a_global_batch_that_does_not_divide_names_all_three_numbers(tiny: list[str]) -> None:
    finished = run_training([*tiny, "training.micro_batch_size=4"], num_processes=2, expect=2)
    (line,) = finished.errors
    assert "must be a multiple of micro_batch_size 4 x 2 processes = 8, got 12; nearest: 8, 16" in line


def test_a_port_in_use_is_one_line(tiny: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        finished = run_training([*tiny, "training.micro_batch_size=6"], environment=variables, expect=4)
    (line,) = finished.errors
    assert f"the rendezvous at 127.0.0.1:{port} must be free and reachable, got: it is in use" in line


def test_an_error_is_printed_once_by_the_main_process(tiny: list[str]) -> None:
    finished = run_training([*tiny, "training.max_stpes=3"], num_processes=2, expect=2)
    assert len(finished.errors) == 1
    assert finished.outputs[1].splitlines()[0] == "error: only process 1 met this:", "no launcher ended it here"


def test_ddp_settings_and_the_timeout_reach_the_engine() -> None:
    def run() -> list[Any]:
        import torch.distributed as dist
        from test_step import make_model

        from acc_lm.config import DistributedConfig, TrainingConfig
        from acc_lm.runtime import build_accelerator

        settings = DistributedConfig(
            find_unused_parameters=True,
            gradient_as_bucket_view=False,
            bucket_cap_mb=3,
            static_graph=True,
            timeout_seconds=77,
        )
        accelerator = build_accelerator(TrainingConfig(max_steps=1, global_batch_size=2, micro_batch_size=1), settings)
        model = accelerator.prepare(make_model("llama", "float32"))
        timeout = dist.distributed_c10d._get_default_group()._get_backend(accelerator.device).options._timeout
        return [
            model.find_unused_parameters,
            model.gradient_as_bucket_view,
            model.bucket_bytes_cap,
            model.static_graph,
            timeout.total_seconds(),
        ]

    assert run_everywhere(run, 2)[0] == [True, False, 3 * 2**20, True, 77.0]


def test_bf16_is_used_when_the_recipe_or_the_launch_says_so(tiny: list[str], tmp_path: Path) -> None:
    by_recipe = run_training([*tiny, "training.mixed_precision=bf16"], environment={"ACCELERATE_MIXED_PRECISION": "no"})
    assert "bf16 autocast" in by_recipe.output
    assert "precision bf16 is the recipe's; the Accelerate config's no is overruled" in by_recipe.output
    run_training([*tiny, f"output_dir={tmp_path / 'b'}"], environment={"ACCELERATE_MIXED_PRECISION": "bf16"})
    run_training([*tiny, f"output_dir={tmp_path / 'c'}"])
    first, second, plain = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "b", "c"))
    losses = [json.loads(lines[0])["train/loss"] for lines in (first, second, plain)]
    assert losses[0] == losses[1] != losses[2]
    assert abs(losses[0] - losses[2]) < 2e-2 * losses[2]


def test_compiling_through_the_launch_changes_names_nowhere(tiny: list[str], tmp_path: Path) -> None:
    run_training([*tiny, "training.max_steps=3"], environment={"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, timeout=240)
    run_training([*tiny, "training.max_steps=3", f"output_dir={tmp_path / 'plain'}"])
    from safetensors import safe_open

    names, losses = [], []
    for name in ("run", "plain"):
        for file in ("final/model.safetensors", "checkpoints/step-00000003/tensors.safetensors"):
            with safe_open(tmp_path / name / file, "pt") as tensors:
                names.append(sorted(tensors.keys()))
        losses.append(json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["eval/loss"])
    assert names[0] == names[2]
    assert names[1] == names[3]
    assert abs(losses[0] - losses[1]) < 1e-5 * losses[1]
