"""Whole steps of the recipes on fake tensors, all blocks and rows, next to what the planner says of them.

`benchmarks.planning` writes the table into docs/planning.md; tests/planning compares the smaller models.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from acc_lm.config import Config
from acc_lm.config.project import find_accelerate_config
from acc_lm.modeling.losses import as_on_gpu
from acc_lm.planning.hardware import GIB
from acc_lm.planning.memory import memory_of
from acc_lm.planning.probe import SWITCH, Checkpointing, Probe
from acc_lm.runtime import LiveBytes, placement_of, split_global_batch
from benchmarks.headers import ROOT, probe_of

LAUNCHES = (("single_gpu", 1), ("fsdp2", 8), ("fsdp2_grad_op", 8))


def whole_run(probe: Probe, config: Config, checkpointing: Checkpointing, accumulation: int, *, fake: bool) -> float:
    """The most bytes of tensors in the second step of a single process, with the branches of the probe's device."""
    autocasts = config.training.mixed_precision == "bf16"
    with probe._fake() if fake else contextlib.nullcontext():
        model = probe._build(probe.num_blocks, torch.float32, checkpointing).model
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
        ids = torch.zeros(config.training.micro_batch_size, config.data.sequence_length, dtype=torch.int64)
        live = LiveBytes()
        for tensor in (*model.parameters(), *model.buffers()):
            live.add(tensor)
        with live.counting():
            for _ in range(2):
                live.forget()
                for _ in range(accumulation):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                        loss = model(input_ids=ids, targets=ids)
                    loss.backward()
                    del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                most = live.most
    return most


@contextlib.contextmanager
def _fake_group(num_processes: int) -> Iterator[Any]:
    """Mesh of a process group that sends nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_processes)
    try:
        yield init_device_mesh("cpu", (num_processes,))
    finally:
        dist.destroy_process_group()


def whole_sharded_run(
    probe: Probe, config: Config, num_processes: int, checkpointing: Checkpointing, accumulation: int, *, reshards: bool
) -> float:
    """The most bytes on rank 0 in the second step of real `fully_shard`, on fake tensors and a fake process group."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with _fake_group(num_processes) as mesh, FakeTensorMode(allow_non_fake_inputs=True), as_on_gpu():
        model: Any = probe._build(probe.num_blocks, torch.float32, checkpointing).model
        _shard(model, reshards, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)
        ids = torch.zeros(config.training.micro_batch_size, config.data.sequence_length, dtype=torch.int64)
        gc.collect()
        live = LiveBytes()
        for parameter in model.parameters():
            live.add(parameter._local_tensor)
        for buffer in model.buffers():
            live.add(buffer)
        with live.counting():
            for _ in range(2):
                live.forget()
                for _ in range(accumulation):
                    loss = model(input_ids=ids, targets=ids)
                    loss.backward()
                    del loss
                most = live.most
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return most


def _shard(model: Any, reshards: bool, **settings: Any) -> None:
    """Shard as Accelerate does: a unit per block, one for the embedding, and one for the last norm with the head."""
    from torch.distributed.fsdp import fully_shard

    blocks = getattr(model.base_model, "layers", None) or model.base_model.h
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshards, **settings)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    norm = getattr(model.base_model, "norm", None) or model.base_model.ln_f
    if embedding.weight is head.weight:
        last = [norm, embedding, head]
    else:
        fully_shard(embedding, reshard_after_forward=reshards, **settings)
        last = [norm, head]
    fully_shard(last, reshard_after_forward=False, **settings)
    fully_shard(model, **settings)


@dataclass(frozen=True)
class Comparison:
    """One launch of a recipe."""

    recipe: str
    launch: str
    micro_batch_size: int
    planned: float
    whole: float

    @property
    def error(self) -> float:
        return self.planned / self.whole - 1


def compare(file: Path, launch: str, num_gpus: int, overrides: tuple[str, ...] = ()) -> Comparison | None:
    """Plan of a recipe next to a whole step of it; None for a recipe whose model depends on its text."""
    found = probe_of(file, overrides)
    if found is None:
        return None
    config, probe = found
    num_gpus = math.gcd(num_gpus, config.training.global_batch_size)
    rows, accumulation = split_global_batch(config.training, num_gpus)
    config = config.model_copy(update={"training": config.training.model_copy(update={"micro_batch_size": rows})})
    accumulation = min(accumulation, 2)  # further micro-batches change nothing
    checkpointing = next(key for key, value in SWITCH.items() if value == config.model.gradient_checkpointing)
    placement = placement_of(find_accelerate_config(launch), num_gpus, 1, config)
    planned = memory_of(probe, placement, rows, accumulation, checkpointing).tensors
    if num_gpus == 1:
        whole = whole_run(probe, config, checkpointing, accumulation, fake=True)
    else:
        reshards = launch == "fsdp2"
        whole = whole_sharded_run(probe, config, num_gpus, checkpointing, accumulation, reshards=reshards)
    return Comparison(file.stem, f"{launch} on {num_gpus}", rows, planned, whole)


def recipes_page() -> str:
    """Table of all recipes whose model does not depend on their text."""
    lines = [
        "Tensors of a whole step at the recipe's own width, depth and rows, with at most two micro-batches, on fake tensors and a process",
        "group that sends nothing. A GPU's branches; no DDP and no DeepSpeed, which do not run on fake tensors.",
        "",
    ]
    lines += ["| recipe | launch | rows | plan, GiB of tensors | whole step | error |", "|---|---|---|---|---|---|"]
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        for launch, num_gpus in LAUNCHES:
            found = compare(file, launch, num_gpus)
            if found is not None:
                lines.append(
                    f"| {found.recipe} | {found.launch} | {found.micro_batch_size} | {found.planned / GIB:.2f} "
                    f"| {found.whole / GIB:.2f} | {100 * found.error:+.1f} % |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(recipes_page())
