"""`acc-lm plan`: an expert's choices, its table and JSON, and refusals of one line."""

from __future__ import annotations

import contextlib
import json
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT

from acc_lm.cli import main
from acc_lm.config import Config
from acc_lm.config.loading import load_config
from acc_lm.planning.hardware import GIB, parse_gpus
from acc_lm.planning.plan import compute_dtype
from acc_lm.planning.probe import Probe, vocabulary_of
from acc_lm.runtime import CONFIGS_BY_SIZE, NOT_PLANNED, WITH_LAYERS_IN_PARTS, WITH_ROWS_IN_PARTS, placement_of
from benchmarks.choices import CASES, MODELS, Case, choice_of, plan_for, probe_of
from benchmarks.headers import VOCABULARY


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Arguments of the recipes of benchmarks.choices from scratch, by model."""
    folder, found = tmp_path_factory.mktemp("recipes"), {}
    for model, given in MODELS.items():
        if isinstance(given, dict):
            file = folder / f"{model}.yaml"
            file.write_text(json.dumps(given))
            found[model] = [str(file)]
    return found


@pytest.fixture(autouse=True)
def one_probe_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one model measure it once, because a probe takes seconds."""

    def cached(config: Config, vocab_size: int) -> Probe:
        key = config.model_copy(update={"training": None}).model_dump_json()
        if key not in PROBES:
            PROBES[key] = Probe(config, vocab_size)
        return PROBES[key]

    monkeypatch.setattr("acc_lm.planning.probe.Probe", cached)


PROBES: dict[str, Probe] = {}


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_config_is_planned_or_says_why_not() -> None:
    names = {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert names == {name for group in CONFIGS_BY_SIZE.values() for name in group} | {
        *WITH_ROWS_IN_PARTS,
        *WITH_LAYERS_IN_PARTS,
        *NOT_PLANNED,
    }


def test_a_plan_ignores_that_another_run_here_uses_the_launchers_port(recwarn: pytest.WarningsRecorder) -> None:
    config = probe_of("quickstart")[0]
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # in use already
            other.bind(("127.0.0.1", 29500))
            other.listen()
        for name, machines in ("ddp", 1), ("multi_node_ddp", 2):
            placement = placement_of(ROOT / f"accelerate_configs/{name}.yaml", 8 * machines, machines, config)
            assert (placement.num_processes, placement.num_machines) == (8 * machines, machines)
    assert not [each for each in recwarn if "Port" in str(each.message)]


@pytest.mark.parametrize("recipe", ["pretrain_gpt2-124m_fineweb-edu", "pretrain_llama-1b_fineweb-edu"])
def test_the_vocabulary_of_a_recipe_from_scratch_needs_no_network(recipe: str) -> None:
    config = load_config(ROOT / f"recipes/{recipe}.yaml")
    assert vocabulary_of(config) == 0, "the recipe names it"
    assert config.model.config
    assert config.model.config["vocab_size"] == VOCABULARY[config.tokenizer.name_or_path or ""]


QUICK = [case for case in CASES if case.model in ("quickstart", "8B", "70B")]
"""Cases of models that other tests here measure, too, and of a small one."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.model}-{case.gpus}", marks=pytest.mark.slow if case.model == "70B" else [])
        for case in QUICK
    ],
)
def test_the_recommendation_is_an_experts(case: Case) -> None:
    is_as_in_the_table(case)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in QUICK], ids=lambda case: f"{case.model}-{case.gpus}"
)
def test_the_recommendation_for_other_models_is_an_experts(case: Case) -> None:
    is_as_in_the_table(case)


def is_as_in_the_table(case: Case) -> None:
    """An expert's choice, or another one where the table of docs/planning.md says so."""
    plan = plan_for(case.model, case.gpus)
    assert choice_of(plan) == case.planned
    if plan.recommended is not None and plan.recommended.fits == "yes":
        assert plan.recommended.memory.high <= parse_gpus(case.gpus)[1].memory_gib * GIB


@pytest.mark.parametrize("gpus", ["8xH100", "64xH100"])
def test_the_json_has_ranges(gpus: str, recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned([*recipes["8B"], "--gpus", gpus], capsys)
    assert code == 0
    assert found["recommended"] in found["rows"]
    for row in found["rows"]:
        memory, speed = row["memory_gib"], row["tokens_per_second"]
        assert memory["tensors"] < memory["low"] < memory["high"]
        assert speed["low"] < speed["middle"] < speed["high"]
        assert (row["network_gb_per_step"] > 0) == (gpus == "64xH100")


def test_without_a_model_of_speed_the_recipes_micro_batch_is_taken_or_the_next_that_fits() -> None:
    found = [plan_for("Qwen3 0.6B, LoRA", gpus).recommended for gpus in ("RTX 4090", "RTX 3060")]
    assert [(each.micro_batch_size, each.compiled, each.time) for each in found if each] == [
        (2, False, None),
        (1, False, None),
    ]


def test_the_table_of_choices_is_complete() -> None:
    text = (ROOT / "docs/planning.md").read_text()
    lines = [line for line in text.splitlines() if line.endswith(tuple(f"| {case.why} |" for case in CASES))]
    assert len(lines) == len(CASES), "python -m benchmarks.choices docs/planning.md"


def test_a_plan_takes_seconds_and_little_memory(recipes: dict[str, list[str]]) -> None:
    command = [sys.executable, "-m", "acc_lm", "plan", *recipes["70B"], "--gpus", "64xH100", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["recommended"]
    assert after.ru_maxrss * 1024 < 2 * GIB
    assert after.ru_utime - before.ru_utime < 60, "half a minute too slow would be a probe of every depth"


def test_the_table_says_what_to_take_and_why(recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *recipes["8B"], "--gpus", "8xH100", "--price", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (taken,) = (line for line in lines if line.startswith("*"))
    assert taken.split()[1] == "fsdp2"
    assert any(line.startswith("  ddp ") and "does not fit: weights, moments and buckets" in line for line in lines)
    assert sum(line.startswith("  not ") for line in lines) == 2
    (command,) = (line for line in lines if "accelerate launch" in line)
    assert "--num_processes 8" in command
    assert "model.gradient_checkpointing=selective" in command
    assert "cost" in lines[5]
    assert any(line.startswith("  energy ") and "kWh at most" in line for line in lines)


def test_a_plan_names_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    packed = ["data.attend_across_documents=false", "optimizer.name=muon"]
    for words, count in ([], 0), (packed[1:], 1), (packed, 2):
        assert main(["plan", "quickstart", "--gpus", "1xT4", "training.micro_batch_size=1", *words]) == 0
        assert capsys.readouterr().out.count("left out ") == count


def test_pins_choose_one_config_and_micro_batch(
    recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    pins = ["--gpus", "8xH100", "--config", "fsdp2", "training.micro_batch_size=2", "--all"]
    _, found = planned([*recipes["8B"], *pins], capsys)
    assert {(row["config"], row["micro_batch_size"]) for row in found["rows"]} == {("fsdp2", 2)}
    assert len(found["rows"]) == 6  # three kinds of checkpointing, compiled or not
    for row in found["rows"]:
        hours = 1000 * 128 * 8192 / row["tokens_per_second"]["low"] / 3600
        assert row["hours"]["high"] == pytest.approx(hours)
        assert row["most_kwh"] == pytest.approx(hours * 8 * 0.7)
    by_kind = {row["gradient_checkpointing"]: row["memory_gib"]["tensors"] for row in found["rows"]}
    assert by_kind["no"] > by_kind["selective"] > by_kind["full"]


def test_a_command_for_several_machines_says_how_many_copies_and_shards(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["training.global_batch_size=64", "training.micro_batch_size=1", "--config", "multi_node_hsdp"]
    assert main(["plan", "quickstart", "--gpus", "32xH100", *pins]) == 0
    (command,) = (line for line in capsys.readouterr().out.splitlines() if "accelerate launch" in line)
    assert "--num_processes 32 --num_machines 4 --machine_rank RANK --main_process_ip HOST " in command
    assert "--parallelism_config_dp_replicate_size 4 --parallelism_config_dp_shard_size 8 " in command


def test_a_model_without_published_runs_has_memory_and_the_reason_for_no_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pins = ["training.micro_batch_size=1", "--config", "single_gpu", "--gpus", "L4"]
    experts = "model.config={model_type: mixtral, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, num_local_experts: 2}"  # fmt: skip
    for words, reason in ([], None), ([experts, "training.mixed_precision=bf16"], "experts"):
        code, found = planned(["quickstart", *pins, *words], capsys)
        assert code == 0
        assert found["recommended"]["memory_gib"]["tensors"] > 0
        if reason is None:
            assert found["speed_not_modelled"] is None
            assert found["recommended"]["tokens_per_second"] is not None
        else:
            assert reason in found["speed_not_modelled"]
            assert found["recommended"]["tokens_per_second"] is None


def test_nothing_fits_is_exit_4_with_ways_out(
    recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *recipes["70B"], "--gpus", "8xH100"]) == 4
    text = capsys.readouterr().out
    assert "nothing fits" in text
    assert "32 x H100 fit" in text
    assert "GB of memory in each machine" in text


def test_rows_are_shared_where_complete_ones_are_too_few_or_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["quickstart", "training.global_batch_size=2", "training.micro_batch_size=1", "--gpus"]
    code, found = planned([*few, "4xH100"], capsys)
    assert code == 0
    assert {(row["config"], row["rows_in_parts"], row["layers_in_parts"]) for row in found["rows"]} == {
        ("ddp_sequence", 2, 1), ("sequence_parallel", 2, 1), ("deepspeed_zero3_sequence", 2, 1),
        ("fsdp2_tensor_parallel", 1, 2), ("tensor_parallel", 1, 4),
    }  # fmt: skip
    assert main(["plan", *few, "4xH100", "--config", "ddp_sequence"]) == 0
    assert "--num_processes 4 --parallelism_config_sp_size 2 " in capsys.readouterr().out
    assert main(["plan", *few, "16xH100"]) == 2
    assert "must be a multiple of the 16 GPUs, got 2" in capsys.readouterr().err, "8 do not divide 4 heads"

    assert main(["plan", *few, "4xH100", "--config", "fsdp2_tensor_parallel"]) == 0
    words = capsys.readouterr().out
    assert "--num_processes 4 --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 2 " in words
    assert "layers in 2 parts" in words

    long = [
        "quickstart",
        "model.config.max_position_embeddings=2097152",
        "data.sequence_length=2097152",
        "--gpus",
        "4xT4",
    ]
    code, found = planned(long, capsys)
    rows = {row["config"]: row for row in found["rows"]}
    assert code == 0
    assert found["recommended"]["config"] == "ddp_sequence"
    assert rows["ddp"]["fits"] == rows["fsdp2"]["fits"] == "no"
    assert 1 < rows["ddp_sequence"]["rows_in_parts"] <= 4
    whole, part = rows["ddp"]["memory_gib"]["tensors"], rows["ddp_sequence"]["memory_gib"]["tensors"]
    assert part == pytest.approx(whole / rows["ddp_sequence"]["rows_in_parts"], rel=0.1), "nearly all is activations"


def test_a_file_with_parts_of_its_own_is_planned_as_it_would_be_launched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of a process, and options of the command, of a config that is given by its path."""
    few = ["quickstart", "training.global_batch_size=2", "training.micro_batch_size=1", "--gpus"]
    shipped = ROOT / "accelerate_configs/tensor_parallel.yaml"
    found = {}
    for config in ("tensor_parallel", shipped, shutil.copy(shipped, tmp_path / "own.yaml")):
        assert main(["plan", *few, "2xH100", "--config", str(config)]) == 0
        found[config] = capsys.readouterr().out
    name, path, own = found.values()
    assert name == path
    assert "--num_processes 2 --parallelism_config_tp_size 2 " in name
    assert "--config_file accelerate_configs/tensor_parallel.yaml " in path
    assert f"--config_file {tmp_path}/own.yaml --num_processes 2 --dynamo_backend" in own, (
        "the file has the size; sp_size would be another division"
    )
    assert own.split("\n\n")[1].split()[-15:] == name.split("\n\n")[1].split()[-15:], "rows, memory and speed"

    text = (ROOT / "accelerate_configs/fsdp2_tensor_parallel.yaml").read_text()
    both = tmp_path / "both.yaml"
    both.write_text(
        text.replace("dp_shard_size: 2", "dp_shard_size: 1").rstrip() + "\n  parallelism_config_sp_size: 2\n"
    )
    assert main(["plan", *few, "4xH100", "--config", str(both)]) == 0
    assert "rows in 2 parts, layers in 2 parts" in capsys.readouterr().out
    assert main(["plan", *few, "4xH100", "--config", str(both), "training.global_batch_size=1"]) == 0
    for gpus in ("1xH100", "2xH100"):
        assert main(["plan", *few, gpus, "--config", str(both)]) == 4, "its sizes are those of four processes"
        assert "error: parallelism_config must multiply to the number of processes" in capsys.readouterr().err

    hsdp = tmp_path / "hsdp.yaml"
    text = (ROOT / "accelerate_configs/hsdp.yaml").read_text().partition("parallelism_config:")[0]
    sizes = {"dp_replicate": 2, "dp_shard": 2, "sp": 2}
    hsdp.write_text(
        text + "parallelism_config:\n" + "".join(f"  parallelism_config_{k}_size: {n}\n" for k, n in sizes.items())
    )
    placement = placement_of(hsdp, 8, 1, probe_of("quickstart")[0])
    assert (placement.shards, placement.replicas) == (4, 2), "processes that share a row hold different shards"


def test_a_model_of_16_bits_computes_in_them_and_its_adapter_is_held_in_32() -> None:
    config = load_config(ROOT / "recipes/quickstart.yaml", ["model.dtype=bfloat16"])
    adapted = config.model_copy(update={"adapter": config.adapter.model_copy(update={"kind": "lora"})})
    for name, count, buckets in ("single_gpu", 1, 0), ("ddp", 2, 4), ("fsdp2", 2, 0):
        file, shards = ROOT / f"accelerate_configs/{name}.yaml", 2 if name == "fsdp2" else 1
        whole, adapter = (placement_of(file, count, 1, each) for each in (config, adapted))
        assert compute_dtype(config, whole) == "bfloat16"
        assert whole.weights == adapter.weights == 2 / shards, "bytes of a parameter"
        assert whole.state == (4 + buckets / 2) / shards, "two moments, and DDP's bucket"
        assert adapter.weights + adapter.state == (4 + 8 + buckets) / shards, "all in float32"
        assert (whole.held, adapter.held) == (2 / shards, 4 / shards)


def written(folder: Path, config: str, *edits: tuple[str, str], name: str = "own") -> str:
    """Copy of one of the project's configs, with edits, as a user's own file."""
    text = (ROOT / f"accelerate_configs/{config}.yaml").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return str(file)


DYNAMO = ("num_processes:", "dynamo_config:\n  dynamo_backend: INDUCTOR\nnum_processes:")
PARTS = ("parallelism_config_sp_size", "parallelism_config_cp_size")


@pytest.mark.parametrize(
    ("gpus", "config", "edits", "name", "options"),
    [
        ("1xH100", "single_gpu", [], "own", ["--dynamo_backend", "inductor"]),
        ("1xH100", "ddp", [], "own", ["--num_processes", "1", "--dynamo_backend", "inductor"]),
        ("1xH100", "deepspeed_zero2_offload", [], "own", ["--num_processes", "1"]),
        ("1xH100", "fsdp2_offload", [("num_processes: 2", "num_processes: -1")], "own", ["--num_processes", "1"]),
        ("2xH100", "multi_node_deepspeed_zero3", [], "own", ["--num_processes", "2", "--num_machines", "1"]),
        ("2xH100", "deepspeed_zero1", [DYNAMO], "own", ["--num_processes", "2", "--dynamo_backend", "no"]),
        ("2xH100", "ddp_sequence", [PARTS], "ddp_sequence", ["--num_processes", "2", "--dynamo_backend", "inductor"]),
    ],
)
def test_the_command_starts_what_was_planned_whatever_the_file_says(
    gpus: str,
    config: str,
    edits: list[tuple[str, str]],
    name: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = written(tmp_path, config, *edits, name=name)
    assert main(["plan", "quickstart", "--gpus", gpus, "--config", file]) == 0
    (command,) = (line for line in capsys.readouterr().out.splitlines() if "--config_file" in line)
    words = shlex.split(command)
    assert words[4 : words.index("train.py")] == options


@pytest.mark.parametrize(
    ("config", "edit", "overrides", "message", "code"),
    [
        ("fsdp2", ("params: false", "params: false\n  fsdp_activation_checkpointing: true"), [], "must be false", 4),
        ("fsdp2", ("fsdp_offload_params", "fsdp_ofload_params"), [], "did you mean fsdp_offload_params?", 4),
        ("fsdp2", ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"), [], "got SIZE_BASED_WRAP", 4),
        ("hsdp", ("", ""), [], "got dp_replicate_size 2 x dp_shard_size 2 for 8 processes", 4),
        ("hsdp", ("replicate_size: 2", "replicate_size: 1"), [], "dp_replicate_size 1 x dp_shard_size 2 for 8", 4),
        ("fsdp2_offload", ("", ""), ["training.mixed_precision=fp16"], "must be false with fp16", 4),
        ("deepspeed_zero2", ("", ""), ["model.dtype=bfloat16"], "model.dtype must be float32 under DeepSpeed", 4),
        ("deepspeed_zero3", ("", ""), ["training.mixed_precision=fp8"], "must be bf16 or no under DeepSpeed", 4),
        ("fsdp2", ("", ""), ["training.find_micro_batch_size=true"], "must be false under fsdp2", 2),
        ("ddp", ("", ""), ["data.sequence_length=4096"], "max_position_embeddings", 2),
    ],
)
def test_what_no_launch_would_start_is_not_planned(
    config: str,
    edit: tuple[str, str],
    overrides: list[str],
    message: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = written(tmp_path, config, edit)
    assert main(["plan", "quickstart", "--gpus", "8xH100", "--config", file, *overrides]) == code
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("override", ["model.dtype=bfloat16", "optimizer.name=muon", "training.mixed_precision=fp8"])
def test_configs_that_refuse_a_recipe_are_left_out_of_its_plan(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = planned(["quickstart", "--gpus", "8xH100", override], capsys)
    assert code == 0
    assert {row["config"] for row in found["rows"]} == {"ddp", "fsdp2_grad_op", "fsdp2", "fsdp2_offload"}


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--gpus", "8xH10O"], "nearest: 8xH100", 2),
        (["--gpus", "0xH100"], "positive number", 2),
        (["--gpus=-1xH100"], "positive number", 2),
        (["--gpus", "8×H100", "--config", "fsdp3"], "nearest: fsdp2", 2),
        (["--gpus", "7xH100"], "training.global_batch_size must be a multiple of the 7 GPUs, got 128", 2),
        (["--gpus", "8xH100", "--config", "cpu"], "got cpu: for a machine without GPUs", 2),
        (["--gpus", "2xH100", "--config", "single_gpu"], "got single_gpu, which uses 1 of 2", 2),
        (["--gpus", "1xH100", "--config", "ddp_sequence"], "got ddp_sequence, whose processes share rows", 2),
        (["--gpus", "7xH100", "--config", "tensor_parallel"], "must be a multiple of the 7 GPUs", 2),
        (
            [
                "--gpus",
                "3xH100",
                "--config",
                "tensor_parallel",
                "training.global_batch_size=3",
                "training.micro_batch_size=1",
            ],
            "parallelism_config_tp_size must divide the 32 attention heads and the 8 key-value heads of the model, got 3",
            2,
        ),
        (["--gpus", "9xH100"], "must fill every machine equally, got 9 on 2 machines", 2),
        (["--gpus", "64xH100", "--network", "0"], "--network must be a positive number, got 0", 2),
        (["--gpus", "H100", "--machine-memory", "-1"], "--machine-memory must be a positive number, got -1", 2),
        (["--gpus", "H100", "--price", "nan"], "--price must be a positive number, got nan", 2),
        (["--gpus", "8xA100", "training.mixed_precision=fp8"], "must be bf16 or no for the GPU A100-80, got fp8", 2),
        (["--gpus", "4xT4", "training.mixed_precision=bf16"], "must be fp16 or no for the GPU T4, got bf16", 2),
        (["--gpus", "8xH100", "training.micro_batch_size=3", "training.global_batch_size=24"], "", 0),
        (["--gpus", "8xH100", "model.config.hidden_size=4097"], "model", 2),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, code: int, recipes: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipes["8B"][0], *arguments]) == code
    error = capfd.readouterr().err.strip()
    assert message in error
    assert code == 0 or len(error.splitlines()) == 1
