"""GPU branches, without a GPU: fake_cuda.py runs train.py on tensors that only pretend to exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import MODELS
from processes import LAUNCH_VARIABLES, ROOT, launcher_environment

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, for what a CPU build of torch lacks"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, for test_gpu.py"),
]
RUNS = {
    "bf16": ["training.mixed_precision=bf16"],
    "fp32": ["training.mixed_precision=no"],
    "fp16": ["training.mixed_precision=fp16"],
    "muon, saved in the background": ["training.mixed_precision=bf16", "optimizer.name=muon", "checkpoint.asynchronous=true"],
    "packed rows": ["training.mixed_precision=bf16", "data.attend_across_documents=false"],
    "gradient checkpointing": ["training.mixed_precision=bf16", "model.gradient_checkpointing=true"],
    "selective checkpointing": ["training.mixed_precision=bf16", "model.gradient_checkpointing=selective"],
    "LoRA": ["training.mixed_precision=bf16", "adapter.kind=lora", "model.config=null", "model.name_or_path={hub}/HuggingFaceTB/SmolLM2-135M"],
    "GPT-2 with its odd vocabulary": ["training.mixed_precision=bf16", "model.config={model_type: gpt2, n_embd: 64, n_layer: 1, n_head: 4, vocab_size: 331}"],
    "experts": ["training.mixed_precision=bf16", "model.config={model_type: mixtral, hidden_size: 64, intermediate_size: 64, "
                "num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, num_local_experts: 4, num_experts_per_tok: 2}"],
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in ("bf16", "experts") else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_no_step_waits_for_a_gpu_or_copies_from_unpinned_memory(name: str, hub: Path) -> None:
    overrides = [override.replace("{hub}", str(hub)) for override in RUNS[name]]
    command = [sys.executable, str(ROOT / "tests/support/fake_cuda.py"), *overrides]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    lines = re.findall(r"^ +\d+ (?:step|other) .*", run.stdout, re.M)
    print(*lines, sep="\n")
    assert any("other WAIT tolist()" in line and "divergence.py" in line for line in lines), "the trap must work"
    assert not [line for line in lines if " step " in line or "PAGEABLE" in line or "SLOW" in line]
    assert "driver: train/gpu_memory_gb/0 train/gpu_utilization/0\n" in run.stdout
    assert "energy: 1.0\n" in run.stdout
    saves = [line.split()[0] for line in lines if "take_snapshot" in line or "count_updates" in line or " keep" in line]
    assert saves == ["1", "1"], (
        "the host waits once for all tensors of a checkpoint, and once for the counts of updates"
    )


def handed_over(
    config: str, precision: str, model: str = "llama", count: int = 8, program: str = "fake_engines", **distributed: Any
) -> dict[str, Any]:
    """Arguments that the engine of a config gets from process 0 of `count`, each with a GPU; one optimizer step is 2 micro-batches of 1 row."""
    recipe = {
        "output_dir": "unused", "model": {"config": MODELS[model]}, "tokenizer": {"kind": "byte"},
        "data": {"source": "synthetic", "sequence_length": 16}, "tracking": {"report_to": []}, "distributed": distributed,
        "training": {"max_steps": 1, "global_batch_size": 16, "micro_batch_size": 1, "mixed_precision": precision},
        "optimizer": {"max_grad_norm": 0.7}, "schedule": {"name": "constant"},
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
    environment |= launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", count)
    environment.pop("ACCELERATE_USE_CPU", None)  # with a GPU the launcher would not set it
    places = {
        "RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
    }
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment |= places | {"MASTER_PORT": "1", "DS_ACCELERATOR": "cuda", "PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / f"tests/support/{program}.py"), json.dumps(recipe)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    seen: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert seen["device"] == "cuda:0"
    if program == "fake_parts":
        return seen
    assert (seen["group"]["backend"], seen["group"]["timeout"]) == ("nccl", "0:11:00"), "a minute after our own limit"
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("config", "parts"), [("ddp", 1), ("ddp_sequence", 2)])
def test_ddp_on_gpus_gets_the_recipes_arguments(config: str, parts: int) -> None:
    seen = handed_over(config, "bf16", bucket_cap_mb=50, static_graph=True, comm_hook="fp16")
    assert seen["parts"] == parts
    assert seen["ddp"] == {
        "device_ids": [0], "output_device": 0, "bucket_cap_mb": 50, "gradient_as_bucket_view": True, "static_graph": True
    }  # fmt: skip
    assert seen["hook"] == "fp16_compress_hook"


@pytest.mark.slow
def test_layers_in_parts_on_gpus_are_not_wrapped_in_ddp() -> None:
    seen = handed_over("tensor_parallel", "bf16", "wide", 2)
    assert (seen["parts"], seen["layers"]) == (1, 2)
    assert "ddp" not in seen


@pytest.mark.parametrize("config", ["tensor_parallel", pytest.param("ddp_sequence", marks=pytest.mark.slow)])
def test_a_step_of_rows_or_layers_in_parts_waits_for_no_gpu(config: str) -> None:
    """Two micro-batches: every tensor is on the device, the host waits for nothing, and each collective is there once."""
    seen = handed_over(config, "bf16", "wide", 2, "fake_parts")
    in_layers = config == "tensor_parallel"
    assert (seen["devices"], seen["rows"], seen["layers"]) == (["cuda:0"], 1 if in_layers else 2, 2 if in_layers else 1)
    assert seen["steps"] == {}, "waits, copies from unpinned memory, attention without a kernel"
    assert [line for line in seen["other"] if "WAIT tolist()" in line], "the trap must work"
    layers, micro_batches = 2, seen["micro_batches"]
    calls = {kind: entry["calls"] for kind, entry in seen["sent"].items()}
    if in_layers:
        assert calls == {"all-reduce": (4 * layers + 2) * micro_batches + 1, "all-gather": micro_batches}
    else:
        assert calls == {"all-to-all": 2 * 4 * layers * micro_batches}


CASES = {
    "zero1 fp16": ("deepspeed_zero1", "fp16", {"stage": 1}),
    "zero2 fp32": ("deepspeed_zero2", "no", {"stage": 2}),
    "zero2 offload bf16": ("deepspeed_zero2_offload", "bf16", {"stage": 2, "offload_optimizer": "cpu"}),
    "zero3 bf16": ("deepspeed_zero3", "bf16", {"stage": 3}),
    "zero3 in parts bf16": ("deepspeed_zero3_sequence", "bf16", {"stage": 3}),
    "zero3 offload bf16": ("deepspeed_zero3_offload", "bf16", {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
    "zero3 by hand bf16": ("deepspeed_zero3_full", "bf16", {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_deepspeed_on_gpus_gets_the_recipes_config(case: str) -> None:
    config, precision, expected = CASES[case]
    seen = handed_over(config, precision)
    settings, zero = seen["deepspeed"], seen["deepspeed"]["zero_optimization"]
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    parts = 2 if "parts" in case else 1  # to DeepSpeed, a part of a row is a row
    assert [settings[name] for name in sizes] == [16 * parts, 1, 2 * parts, 0.7]
    assert [settings.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")] == [
        precision == "bf16",
        precision == "fp16",
    ]
    assert {"stage": zero["stage"]} | {
        name: zero[name]["device"] for name in ("offload_optimizer", "offload_param") if zero.get(name, {}).get("device", "none") != "none"
    } == expected  # fmt: skip
    assert '"auto"' not in json.dumps(settings), "nothing is left to be guessed"
    assert not {"optimizer", "scheduler"} & set(settings)
    sums = (settings.get("data_types", {}).get("grad_accum_dtype"), settings.get("communication_data_type"))
    assert sums == ((None, None) if precision == "no" else ("fp32", "fp32"))
    if expected["stage"] == 3:
        assert (
            seen["partition"].items()
            <= {**settings, "zero_optimization": seen["partition"]["zero_optimization"]}.items()
        )
        assert seen["partition"]["zero_optimization"].items() <= zero.items(), (
            "one config for cutting and for the engine"
        )
    else:
        assert "partition" not in seen


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton")
def test_the_loss_and_a_block_become_triton_code() -> None:
    """15 kernels for the loss at two chunks, 6 for a block, in torch 2.13; attention is flash attention's own."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, str(ROOT / "tests/support/fake_inductor.py")]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    counts = {
        name: tuple(map(int, numbers)) for name, *numbers in
        re.findall(r"^([\w ]+): (\d+) Triton kernels, (\d+) others, (\d+) of flash attention", run.stdout, re.M)
    }  # fmt: skip
    print(counts)
    assert set(counts) == {"fused loss", "one block"}
    assert all(kernels >= 4 for kernels, *_ in counts.values())
    assert counts["one block"][2] == 1
