"""Plan of a step against real steps of every engine on CPU processes: bytes of its tensors, and bytes that it sends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launcher_environment, run_everywhere
from test_tensor_parallel import file_of

from acc_lm import runtime
from acc_lm.config import Config, TokenizerConfig
from acc_lm.planning.memory import memory_of
from acc_lm.planning.plan import bytes_sent, shape_of
from acc_lm.planning.probe import Probe
from acc_lm.runtime import RehearsedBytes, placement_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2000, "max_position_embeddings": 256,
}  # fmt: skip
ENGINES = {
    "single_gpu": 1, "ddp": 2, "fsdp2": 2, "fsdp2_grad_op": 2, "hsdp": 4, "deepspeed_zero1": 2, "deepspeed_zero2": 2,
    "deepspeed_zero3": 2, "deepspeed_zero2_offload": 2, "deepspeed_zero3_offload": 2,
    "ddp_sequence": 2, "sequence_parallel": 4, "deepspeed_zero3_sequence": 2,
    "tensor_parallel": 2, "fsdp2_tensor_parallel": 4, "fsdp2_tensor_sequence": 4,
}  # fmt: skip
LEFT_TO_ALL = (
    "ddp_sequence",
    "deepspeed_zero3_sequence",
    "tensor_parallel",
    "fsdp2_tensor_sequence",
    "fsdp2_grad_op",
    "deepspeed_zero3_offload",
)
"""Engines whose parts are all in another one's case."""
VOCABULARY, ACCUMULATION = 257, 2


def config_of(num_readers: int, precision: str, checkpointing: Any, rows: int, length: int) -> Config:
    return Config.model_validate(
        {
            "model": {"config": LLAMA, "gradient_checkpointing": checkpointing},
            "tokenizer": {"kind": "byte"},
            "data": {"source": "synthetic", "sequence_length": length},
            "training": {
                "max_steps": 3,
                "mixed_precision": precision,
                "global_batch_size": rows * num_readers * ACCUMULATION,
                "micro_batch_size": rows,
            },
            "distributed": {"bucket_cap_mb": 1},  # smaller than the model, as on a GPU
            "tracking": {"report_to": []},
        }
    )


def real_steps(config: Config) -> dict[str, float]:
    """Bytes of tensors between steps and at the most, and bytes sent in a ring, in the third step of this process."""
    from acc_lm.modeling.build import build_empty_model, build_model
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.text.tokenizer import make_tokenizer
    from acc_lm.training.step import train_step

    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    length, rows = config.data.sequence_length, config.training.micro_batch_size
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    runtime.quiet_libraries()
    accelerator = runtime.build_accelerator(config)
    ids = torch.randint(0, VOCABULARY, (rows, length + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    live = RehearsedBytes()
    with live.counting():
        model, _ = runtime.initialise_once(
            accelerator,
            lambda: build_model(config.model, tokenizer, length, 0),
            lambda facts: build_empty_model(config.model, tokenizer, length, facts),
        )
        model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
        runtime.warm_up(accelerator, model, batch)
        gradients = runtime.Gradients(accelerator, model)
        for step in (1, 2, 3):
            live.forget()
            with runtime.Traffic() if step == 3 else contextlib.nullcontext() as traffic:
                train_step(
                    accelerator, model, optimizer, [batch] * ACCUMULATION, step=step, seed=0,
                    num_targets=rows * length * num_processes * ACCUMULATION, max_grad_norm=1.0, gradients=gradients,
                )  # fmt: skip
    sent = runtime.summarize_traffic(traffic.calls)
    return {"most": live.most, "between": live.now, "sent": sum(entry["ring_bytes"] for entry in sent.values())}


@pytest.mark.parametrize(
    ("precision", "checkpointing", "rows", "length"),
    [
        ("bf16", "selective", 8, 128),
        pytest.param("no", False, 8, 128, marks=pytest.mark.slow),
        pytest.param("bf16", True, 8, 128, marks=pytest.mark.slow),
        pytest.param("bf16", False, 1, 16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LEFT_TO_ALL)) for name in ENGINES]
)
def test_a_plan_is_what_a_real_step_holds_and_sends(
    name: str, precision: str, checkpointing: Any, rows: int, length: int, tmp_path: Path
) -> None:
    count = ENGINES[name]
    readers = count // 2 ** (("sequence" in name) + ("tensor" in name))
    config = config_of(readers, precision, checkpointing, rows, length)
    file = file_of(name, tmp_path)
    environment = launcher_environment(file, count) if count > 1 else {}

    def here() -> dict[str, float]:
        torch.set_num_threads(1)
        return real_steps(config)

    real = run_everywhere(here, count, environment=environment)
    placement = placement_of(file, count, 1, config)
    probe = Probe(config, VOCABULARY, on_gpu=False)
    kind = {False: "no", True: "full"}.get(checkpointing, checkpointing)
    plan = memory_of(probe, placement, rows, ACCUMULATION, kind)
    host = plan.host / count  # in a rehearsal that is the same memory
    most, between = max(each["most"] for each in real), max(each["between"] for each in real)
    state = plan.parts["weights, moments and buckets"] + host
    state += placement.buffers * (placement.gathers == "limited")  # there from the start
    found = (plan.tensors + host) / most, state / between
    shape = shape_of(probe)
    assert shape is not None
    sent = bytes_sent(config, shape, placement, rows, ACCUMULATION)
    print(name, precision, checkpointing, found, sent, real[0]["sent"])
    assert sent == pytest.approx(real[0]["sent"], abs=512), "the norm, and buffers"
    assert abs(found[1] - 1) < 0.005
    assert abs(found[0] - 1) < 0.02


def test_rows_of_complete_layers_and_of_their_parts_are_measured_apart() -> None:
    probe = Probe(config_of(1, "no", False, 1, 16), VOCABULARY, on_gpu=False)
    rows, both = probe.in_parts(2), probe.in_layers(2).in_parts(2)
    assert both.parameters.total < 0.6 * rows.parameters.total
    assert both is probe.in_layers(2).in_parts(2)
    assert rows is probe.in_parts(2)
