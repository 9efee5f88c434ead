"""The branches for a GPU, without one: fake_cuda.py runs train.py on tensors that only pretend to be there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import ROOT

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
def test_no_step_waits_for_a_gpu_or_copies_from_memory_that_is_not_pinned(name: str, hub: Path) -> None:
    overrides = [override.replace("{hub}", str(hub)) for override in RUNS[name]]
    command = [sys.executable, str(ROOT / "tests/fake_cuda.py"), *overrides]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    lines = re.findall(r"^ +\d+ (?:step|other) .*", run.stdout, re.M)
    print(*lines, sep="\n")
    assert any("other WAIT tolist()" in line and "divergence.py" in line for line in lines), "the trap must work"
    assert not [line for line in lines if " step " in line or "PAGEABLE" in line or "SLOW" in line]
    saves = [
        line.split()[0] for line in lines if "_take_snapshot" in line or "count_updates" in line or " keep" in line
    ]
    assert saves == ["1", "1"], (
        "the host waits once for all tensors of a checkpoint, and once for the counts of updates"
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton")
def test_the_loss_and_a_block_become_triton_code() -> None:
    """15 kernels for the loss at two chunks, 6 for a block, in torch 2.13; attention is flash attention's own."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, str(ROOT / "tests/fake_inductor.py")]
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
