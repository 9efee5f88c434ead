"""FSDP2 and HSDP: arguments for Accelerate, on GPUs and on CPU processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from acc_lm.errors import MachineError
from acc_lm.runtime.settings.grid import ProcessGrid, parts_of_layers, requested_grid

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig


def fsdp_plugin(precision: str, has_accelerator: bool) -> FullyShardedDataParallelPlugin:
    """Build Accelerate's plugin: one unit per block; under mixed precision 16-bit compute with fp32 reduction and loss.

    Raises:
        MachineError: the Accelerate config sets something that FSDP2 cannot do or that belongs to the recipe.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    if not os.environ.get("FSDP_AUTO_WRAP_POLICY") or os.environ["FSDP_AUTO_WRAP_POLICY"].upper() == "NO_WRAP":
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"  # else the model is one unit, gathered at once
    if os.environ["FSDP_AUTO_WRAP_POLICY"].upper() == "SIZE_BASED_WRAP":
        raise MachineError(
            "fsdp_auto_wrap_policy must be TRANSFORMER_BASED_WRAP or NO_WRAP, got SIZE_BASED_WRAP, which also wraps lists of blocks, "
            "and FSDP2 cannot; use TRANSFORMER_BASED_WRAP: each block is a unit"
        )
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
    if reshard in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"):
        raise MachineError(
            f"fsdp_reshard_after_forward must be true or false with fsdp_version 2, got {reshard}, which is FSDP1's; FULL_SHARD is true, "
            "SHARD_GRAD_OP is false"
        )
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=parts_of_layers() == 1)
    if plugin.activation_checkpointing:
        raise MachineError(
            "fsdp_activation_checkpointing must be false in the Accelerate config, got true; the recipe has one switch for "
            "every backend: model.gradient_checkpointing=true"
        )
    if precision != "no":
        # Accelerate's own policy also rounds the loss and the reduced gradients to 16 bits.
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}[precision]
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None
        )
    if not has_accelerator:
        plugin.cpu_offload = OffloadPolicy()  # the parameters are on the CPU already; torch would look for a GPU
    return plugin


@contextmanager
def loaded_by_every_process() -> Iterator[None]:
    """Context in which transformers loads a model in full on every process.

    Under FSDP, releases before 5.23 leave zeros on all processes but the first, as Accelerate will send them the weights.
    """
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def mesh(num_processes: int) -> ParallelismConfig | None:
    """ProcessGrid of the processes, replicas x shards x parts of layers; None if the launch does not ask for one.

    Raises:
        MachineError: the grid does not have the launch's number of processes, or shards nothing.
    """
    grid = requested_grid()
    if grid == ProcessGrid():  # not even sizes of 1
        return None
    from accelerate.utils import ParallelismConfig

    if grid.layers > 1:  # `check_grid` has seen that their product is the number of processes
        return ParallelismConfig(
            dp_shard_size=grid.shards * grid.rows, tp_size=grid.layers, cp_size=1, sp_size=1, sp_backend="deepspeed"
        )
    in_parts = f" x {grid.key.removeprefix('parallelism_config_')} {grid.rows}" if grid.rows > 1 else ""
    if grid.copies * grid.shards * grid.rows != num_processes:
        raise MachineError(
            f"parallelism_config must multiply to the number of processes, got dp_replicate_size {grid.copies} x dp_shard_size "
            f"{grid.shards}{in_parts} for {num_processes} processes; change num_processes or the sizes"
        )
    shards = grid.shards * grid.rows  # processes that share a row hold different shards, as Accelerate's mesh has it
    if shards == 1:
        raise MachineError(
            f"parallelism_config_dp_shard_size must be at least 2, got 1, which shards nothing, for {num_processes} processes; use "
            "accelerate_configs/ddp.yaml"
        )
    return ParallelismConfig(
        dp_replicate_size=grid.copies, dp_shard_size=shards, tp_size=1, cp_size=1, sp_size=1, sp_backend="deepspeed"
    )


def shard_over_readers(accelerator: Accelerator) -> None:
    """Show Accelerate only the processes that hold the same parts of layers, so that FSDP2 shards over them.

    It would cut the layers itself otherwise, which fails with transformers 5.
    """
    from accelerate.utils import ParallelismConfig

    if parts_of_layers() == 1:
        return
    state: Any = accelerator.state
    state.device_mesh = state.device_mesh["dp_shard_cp"]  # the name that Accelerate looks for
    state.parallelism_config = ParallelismConfig(
        dp_shard_size=state.device_mesh.size(), cp_size=1, sp_size=1, sp_backend="deepspeed"
    )


def shard_on_cpu(precision: str, keywords: dict[str, Any], group: dict[str, Any]) -> None:
    """Make Accelerate keep the request for FSDP on CPU processes.

    Accelerate switches to FSDP on accelerators only, and would silently train with DDP. FSDP2 itself runs on gloo, so
    the shared state is switched right after it is created, as Accelerate does for a GPU.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, TorchDynamoPlugin

    state = AcceleratorState(
        mixed_precision=precision, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True, **keywords, **group
    )
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = keywords["fsdp_plugin"]
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def block_classes(model: nn.Module) -> list[str]:
    """Names of the classes whose modules are gathered as one unit: the Accelerate config's, else the model's own.

    Raises:
        MachineError: the config names a class that the model does not have.
    """
    there = {type(module).__name__ for module in model.modules()}
    # Some models list classes that only their other variants have.
    own = [name for name in getattr(model, "_no_split_modules", None) or [] if name in there]
    named = [name for name in os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",") if name]
    for name in named:
        if name not in there:
            raise MachineError(
                f"fsdp_transformer_layer_cls_to_wrap must name a class of the model, got {name}; "
                f"leave it out, the model's own is {', '.join(own) or 'not known'}"
            )
    return named or own
