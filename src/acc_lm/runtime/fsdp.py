"""FSDP2 and HSDP: what Accelerate is to be told, on GPUs and on CPU processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from acc_lm.errors import MachineError
from acc_lm.runtime.strategy import flag

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig


def fsdp_plugin(precision: str, has_accelerator: bool) -> FullyShardedDataParallelPlugin:
    """Accelerate's plugin: units of one block, 16-bit compute under fp32 reduction and loss.

    Raises:
        MachineError: the Accelerate config decides something that is the recipe's.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    if not os.environ.get("FSDP_AUTO_WRAP_POLICY") or os.environ["FSDP_AUTO_WRAP_POLICY"].upper() == "NO_WRAP":
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"  # else everything is one unit, gathered at once
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
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
        plugin.cpu_offload = OffloadPolicy()  # the parameters are on the CPU as it is; torch would look for a GPU
    return plugin


def mesh(num_processes: int) -> ParallelismConfig | None:
    """The processes in rows of replicas and columns of shards, where the launch asks for such a grid.

    Raises:
        MachineError: the grid has another size than the launch.
    """
    if not flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    from accelerate.utils import ParallelismConfig

    sizes = ParallelismConfig()
    replicas, shards = sizes.dp_replicate_size, sizes.dp_shard_size
    if replicas * shards != num_processes:
        raise MachineError(
            f"parallelism_config must multiply to the number of processes, got dp_replicate_size {replicas} x dp_shard_size "
            f"{shards} for {num_processes} processes; change num_processes or the sizes"
        )
    return sizes


def shard_on_cpu(precision: str, keywords: dict[str, Any], group: dict[str, Any]) -> None:
    """Make Accelerate keep the request for FSDP on CPU processes.

    It switches to FSDP for accelerators only and would train with DDP without a word. FSDP2 itself runs on gloo, so the
    shared state is switched right after it exists, as Accelerate does for a GPU.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, TorchDynamoPlugin

    state = AcceleratorState(
        mixed_precision=precision, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True, **keywords, **group
    )
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = keywords["fsdp_plugin"]
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def check_block_class(accelerator: Accelerator, model: nn.Module) -> None:
    """The unit that is gathered at once is the model's own block class, unless the config names another that exists."""
    plugin = vars(accelerator.state).get("fsdp_plugin")
    if plugin is None:  # Accelerate fell back to something else; `identify` will say so
        return
    there = {type(module).__name__ for module in model.modules()}
    own = getattr(model, "_no_split_modules", None) or []
    named = plugin.transformer_cls_names_to_wrap
    for name in named or []:
        if name not in there:
            raise MachineError(
                f"fsdp_transformer_layer_cls_to_wrap must name a class of the model, got {name}; "
                f"leave it out, the model's own is {', '.join(own) or 'not known'}"
            )
    if named is None:
        # Some models list classes that only their other variants have.
        plugin.transformer_cls_names_to_wrap = [name for name in own if name in there]
